//! Which ranks a rank has control links to.

/// Above this number of ranks, the ranks of a host connect to the lowest rank of their host, so that the coordinator
/// has few links.
const ONE_LEVEL: usize = 128;

/// The links of every rank: to its parent, and to the rank that becomes its parent when that one is gone. Every parent
/// is lower than its children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// By rank: the two parents. The coordinator and ranks that are gone have none.
    parents: Vec<[Option<usize>; 2]>,
    /// By rank: true if another rank may have it as a parent.
    is_inner: Vec<bool>,
}

impl Tree {
    /// The tree of the ranks that are present. `hosts[r]` numbers the host of rank r.
    pub(super) fn of(hosts: &[usize], is_present: impl Fn(usize) -> bool) -> Tree {
        let size = hosts.len();
        let host_of = |rank: usize| if size <= ONE_LEVEL { 0 } else { hosts[rank] };
        let count = hosts.iter().max().map_or(0, |last| last + 1);
        // By host: its lowest two present ranks.
        let mut heads: Vec<[Option<usize>; 2]> = vec![[None; 2]; count];
        let (mut coordinator, mut deputy) = (None, None);
        for rank in (0..size).filter(|rank| is_present(*rank)) {
            let place = if coordinator.is_none() { &mut coordinator } else { &mut deputy };
            place.get_or_insert(rank);
            let [head, second] = &mut heads[host_of(rank)];
            if head.is_none() {
                head.insert(rank)
            } else {
                second.get_or_insert(rank)
            };
        }
        let parents_of = |rank: usize| {
            let [head, second] = heads[host_of(rank)];
            if Some(rank) == coordinator {
                [None, None]
            } else if Some(rank) == deputy {
                [coordinator, None]
            } else if Some(rank) == head || (head == coordinator && Some(rank) == second) {
                [coordinator, deputy]
            } else if Some(rank) == second {
                [head, coordinator]
            } else {
                [head, second]
            }
        };
        let parents = (0..size).map(|rank| if is_present(rank) { parents_of(rank) } else { [None, None] }).collect();
        let mut is_inner = vec![false; size];
        let inner = heads.iter().flatten().chain([&coordinator, &deputy]);
        inner.flatten().for_each(|rank| is_inner[*rank] = true);
        Tree { parents, is_inner }
    }

    /// Removes a rank that no other rank has as a parent. Returns false if another rank may have it as a parent. The
    /// caller must then build the tree again.
    pub(super) fn remove_leaf(&mut self, rank: usize) -> bool {
        let is_leaf = !self.is_inner[rank];
        if is_leaf {
            self.parents[rank] = [None, None];
        }
        is_leaf
    }

    /// Returns the parent of a rank, and the next parent if that one is gone.
    pub(super) fn parents(&self, rank: usize) -> [Option<usize>; 2] {
        self.parents[rank]
    }

    /// Returns the ranks whose parent is `rank`.
    pub(super) fn children(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.parents.iter().enumerate().filter(move |(_, [parent, _])| *parent == Some(rank)).map(|(child, _)| child)
    }

    /// True if messages for a rank go by this rank's link to `child`.
    pub(super) fn is_below(&self, rank: usize, child: usize) -> bool {
        rank == child || self.parents[rank][0] == Some(child)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_world_is_a_star_with_a_deputy() {
        let tree = Tree::of(&[0, 0, 1, 1], |_| true);
        let parents: Vec<_> = (0..4).map(|rank| tree.parents(rank)).collect();
        assert_eq!(parents, [[None, None], [Some(0), None], [Some(0), Some(1)], [Some(0), Some(1)]]);
        let tree = Tree::of(&[0, 0, 1, 1], |rank| rank != 0);
        assert_eq!(tree.parents(3), [Some(1), Some(2)]);
        assert_eq!(tree.children(1).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn a_large_world_has_a_link_for_each_host_at_the_top_and_loses_no_rank_when_one_is_gone() {
        let hosts: Vec<usize> = (0..1024).map(|rank| rank / 16).collect();
        for gone in [None, Some(0), Some(1), Some(16), Some(17), Some(18)] {
            let before = Tree::of(&hosts, |_| true);
            let after = Tree::of(&hosts, |rank| Some(rank) != gone);
            let top = (0..1024).find(|rank| Some(*rank) != gone).unwrap();
            assert!(after.children(top).count() <= 63 + 15);
            for rank in (0..1024).filter(|rank| Some(*rank) != gone && *rank != top) {
                let mut at = rank;
                for _ in 0..2 {
                    at = after.parents(at)[0].unwrap_or(at);
                }
                assert_eq!(at, top, "{rank} without {gone:?}");
                let [parent, _] = after.parents(rank);
                assert!(before.parents(rank).contains(&parent), "{rank} has a link to {parent:?} without {gone:?}");
            }
        }
    }
}
