//! The addresses of the members of a view, as they come.

/// Addresses by rank. Every member of a view collects those of all: they lie in one list, and are counted.
#[derive(Clone, Debug, Default)]
pub(super) struct Addresses {
    /// Empty before the first is known.
    by_rank: Vec<Option<Vec<u8>>>,
    /// How many are known.
    known: usize,
}

impl Addresses {
    pub(super) fn insert(&mut self, rank: usize, address: Vec<u8>) {
        if self.by_rank.len() <= rank {
            self.by_rank.resize(rank + 1, None);
        }
        self.known += usize::from(self.by_rank[rank].replace(address).is_none());
    }

    pub(super) fn get(&self, rank: usize) -> Option<&Vec<u8>> {
        self.by_rank.get(rank).and_then(Option::as_ref)
    }

    pub(super) fn take(&mut self, rank: usize) -> Option<Vec<u8>> {
        let taken = self.by_rank.get_mut(rank).and_then(Option::take);
        self.known -= usize::from(taken.is_some());
        taken
    }

    pub(super) fn are_of(&self, ranks: &[usize]) -> bool {
        self.known >= ranks.len() && ranks.iter().all(|rank| self.get(*rank).is_some())
    }
}
