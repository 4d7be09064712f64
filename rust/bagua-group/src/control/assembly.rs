//! How ranks that join learn that all are connected: reports up a binomial tree, and the answer of rank 0 down. No I/O, clock or socket.
//!
//! The parent of a rank is the rank without its lowest bit that is set, so that parent and child are connected in an
//! [`Overlay`](super::overlay::Overlay). A report says that a rank and all below it are connected.

use std::collections::BTreeSet;

use super::message::Message;

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Step {
    /// Report to this rank, the parent.
    Report(usize, Vec<usize>),
    /// All ranks are connected: send that to these ranks, the children.
    Complete(Vec<usize>, Vec<usize>),
}

impl Step {
    /// The receivers and the message.
    pub(in super::super) fn message(self) -> (Vec<usize>, Message) {
        match self {
            Step::Report(parent, apart) => (vec![parent], Message::Connected { apart }),
            Step::Complete(children, apart) => (children, Message::Complete { apart }),
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub(in super::super) struct Assembly {
    me: usize,
    size: usize,
    /// The children that have not reported.
    waits_for: BTreeSet<usize>,
    /// This rank is connected.
    own: bool,
    /// The ranks of this part of the tree that do not reach their host's others, see [`Assembly::connected`].
    apart: Vec<usize>,
    /// All ranks are connected; `apart` is that of all.
    complete: bool,
}

impl Assembly {
    /// Rank `me` of `size`.
    pub(in super::super) fn new(me: usize, size: usize) -> Assembly {
        let waits_for = children(me, size).collect();
        Assembly { me, size, waits_for, own: false, apart: Vec::new(), complete: false }
    }

    /// This rank is connected to all its neighbours. `apart`: it could not connect to another rank of its host by a Unix socket.
    pub(in super::super) fn connected(&mut self, apart: bool) -> Option<Step> {
        if !std::mem::replace(&mut self.own, true) && apart {
            self.apart.push(self.me);
        }
        self.step()
    }

    /// A child reports.
    pub(in super::super) fn reported(&mut self, child: usize, apart: Vec<usize>) -> Option<Step> {
        if !self.waits_for.remove(&child) {
            return None;
        }
        self.apart.extend(apart.into_iter().filter(|rank| *rank < self.size));
        self.step()
    }

    /// The parent says that all ranks are connected, and which of them are apart.
    pub(in super::super) fn completed(&mut self, apart: Vec<usize>) -> Option<Step> {
        if std::mem::replace(&mut self.complete, true) {
            return None;
        }
        self.apart = apart.clone();
        Some(Step::Complete(children(self.me, self.size).collect(), apart))
    }

    /// The parent and the children of this rank, to which it must be connected.
    pub(in super::super) fn relatives(&self) -> impl Iterator<Item = usize> {
        parent(self.me).into_iter().chain(children(self.me, self.size))
    }

    /// The ranks that are apart, when all ranks are connected.
    pub(in super::super) fn complete(&self) -> Option<&[usize]> {
        self.complete.then_some(&self.apart)
    }

    /// Whom this rank waits for: the children that have not reported, otherwise the parent.
    pub(in super::super) fn waits_for(&self) -> Vec<usize> {
        let children: Vec<usize> = self.waits_for.iter().copied().collect();
        if children.is_empty() { parent(self.me).into_iter().collect() } else { children }
    }

    fn step(&mut self) -> Option<Step> {
        if !self.own || !self.waits_for.is_empty() || self.complete {
            return None;
        }
        self.apart.sort_unstable();
        match parent(self.me) {
            Some(parent) => Some(Step::Report(parent, self.apart.clone())),
            None => self.completed(self.apart.clone()),
        }
    }
}

fn parent(rank: usize) -> Option<usize> {
    (rank > 0).then(|| rank & (rank - 1))
}

fn children(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    let bits = (0..usize::BITS).map_while(|bit| 1usize.checked_shl(bit));
    bits.take_while(move |bit| rank & bit == 0 && rank + bit < size).map(move |bit| rank + bit)
}

#[cfg(test)]
mod tests {
    use super::super::overlay::Overlay;
    use super::*;

    #[test]
    fn every_rank_but_the_first_is_the_child_of_its_parent_to_which_it_is_connected() {
        for size in [1, 2, 3, 16, 17, 21, 64, 100] {
            let mut found: Vec<usize> = (0..size).flat_map(|rank| children(rank, size)).collect();
            found.sort_unstable();
            assert_eq!(found, (1..size).collect::<Vec<_>>());
            for rank in 1..size {
                let above = parent(rank).unwrap();
                assert!(children(above, size).any(|child| child == rank));
                assert!(Overlay::new(rank, size, 4).neighbours().contains(&above), "{rank} of {size}");
            }
        }
    }

    #[test]
    fn all_ranks_are_complete_when_the_last_is_connected_and_know_who_is_apart() {
        for size in [1, 2, 5, 16, 37] {
            let mut all: Vec<Assembly> = (0..size).map(|rank| Assembly::new(rank, size)).collect();
            let mut steps = Vec::new();
            for rank in (0..size).rev() {
                assert!(all.iter().all(|one| one.complete().is_none()));
                steps.extend(all[rank].connected(rank % 3 == 1).map(|step| (rank, step)));
                while let Some((from, step)) = steps.pop() {
                    match step {
                        Step::Report(to, apart) => {
                            steps.extend(all[to].reported(from, apart).map(|step| (to, step)));
                        }
                        Step::Complete(to, apart) => {
                            for child in to {
                                let next = all[child].completed(apart.clone());
                                steps.extend(next.map(|step| (child, step)));
                            }
                        }
                    }
                }
            }
            let apart: Vec<usize> = (0..size).filter(|rank| rank % 3 == 1).collect();
            assert!(all.iter().all(|one| one.complete() == Some(&apart[..])));
        }
    }
}
