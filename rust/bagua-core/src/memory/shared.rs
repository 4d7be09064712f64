//! Memory for tensors in which same-host peers work in place.
//!
//! One anonymous file holds the parts of all ranks of a host, one after the other, and each rank maps the whole file. Freeing is
//! therefore a matter of each rank alone: what a rank has mapped stays valid for it, whatever its peers have let go of.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::arena::Arena;
use super::mapping::Mapping;
use crate::error::{Error, Result};
use crate::wait::lock;

/// This rank's part of an arena, and its view of the parts of the other ranks of this host. Cheap to clone; the memory is given
/// back when the last clone is dropped.
///
/// Where no peer shares memory with this rank it is private memory, so that nobody needs to care.
#[derive(Clone, Debug)]
pub struct SharedArena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    mapping: Mapping,
    /// Equal on the ranks that share this memory, never 0, and never used again; `None` for private memory.
    id: Option<u64>,
    /// World ranks whose parts lie in the mapping, in this order.
    ranks: Vec<usize>,
    /// Which of them is this rank.
    own: usize,
    /// Bytes of a part, as asked for.
    len: usize,
    /// Bytes between the beginnings of two parts: whole pages.
    stride: usize,
    /// Who must forget this memory before it is unmapped.
    registry: Arc<Registry>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The mapping goes after this.
        self.registry.forget();
    }
}

/// Bytes between the parts of an arena of `len` bytes per rank.
///
/// # Errors
/// `InvalidArgument` when `ranks` parts do not fit the address space.
pub fn part_stride(len: usize, ranks: usize) -> Result<usize> {
    let stride = len.max(1).checked_next_multiple_of(rustix::param::page_size());
    let fits = |stride: &usize| stride.checked_mul(ranks).is_some_and(|all| isize::try_from(all).is_ok());
    stride
        .filter(fits)
        .ok_or_else(|| Error::InvalidArgument(format!("{ranks} times {len} bytes do not fit the address space")))
}

impl SharedArena {
    /// The part of `ranks[own]` in a file that holds parts of `len` bytes, [`part_stride`] apart, for these world ranks.
    /// All of them give the same `id`, which is not 0 and was never used before.
    ///
    /// # Errors
    /// `Mismatch` when the file has another size: the ranks do not agree on `len`. `System` when memory is short.
    pub fn shared(
        file: Arena,
        id: u64,
        ranks: Vec<usize>,
        own: usize,
        len: usize,
        registry: &Arc<Registry>,
    ) -> Result<SharedArena> {
        let stride = part_stride(len, ranks.len())?;
        if file.len() != stride * ranks.len() {
            return Err(Error::Mismatch(format!(
                "rank {} asks for an arena of {len} bytes, rank {} for one of {} (in whole pages)",
                ranks[own],
                ranks[0],
                file.len() / ranks.len()
            )));
        }
        let mapping = file.into_mapping();
        // The own part first: memory comes from where the rank that touches it first runs.
        mapping.populate(own * stride..(own + 1) * stride)?;
        mapping.populate(0..stride * ranks.len())?;
        let inner = Inner { mapping, id: Some(id), ranks, own, len, stride, registry: Arc::clone(registry) };
        let arena = SharedArena { inner: Arc::new(inner) };
        registry.enter(&arena);
        Ok(arena)
    }

    /// `len` bytes of this rank's own.
    ///
    /// # Errors
    /// `InvalidArgument` when it does not fit the address space, `System` when memory is short.
    pub fn private(len: usize, rank: usize, registry: &Arc<Registry>) -> Result<SharedArena> {
        let stride = part_stride(len, 1)?;
        let mapping = Mapping::private(stride)?;
        mapping.populate(0..stride)?;
        let inner = Inner { mapping, id: None, ranks: vec![rank], own: 0, len, stride, registry: Arc::clone(registry) };
        Ok(SharedArena { inner: Arc::new(inner) })
    }

    /// Bytes of this rank's part.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// True when it was asked for with no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when peers see this memory.
    pub fn is_shared(&self) -> bool {
        self.inner.id.is_some()
    }

    /// What it is called among the ranks that share it.
    pub fn id(&self) -> Option<u64> {
        self.inner.id
    }

    /// Where the part of a world rank begins in the memory, if it has one.
    pub fn part(&self, rank: usize) -> Option<Range<usize>> {
        let at = self.inner.ranks.iter().position(|one| *one == rank)?;
        Some(at * self.inner.stride..at * self.inner.stride + self.inner.len)
    }

    /// The memory of all parts.
    pub fn mapping(&self) -> &Mapping {
        &self.inner.mapping
    }

    /// First byte of this rank's part, aligned to a page.
    pub fn pointer(&self) -> *mut u8 {
        self.inner.mapping.pointer().wrapping_add(self.inner.own * self.inner.stride)
    }

    /// Address of the first byte of this rank's part.
    pub fn address(&self) -> usize {
        self.pointer() as usize
    }

    /// This rank's part.
    ///
    /// # Safety
    /// While the slice lives nobody writes to the part: neither this process nor, by an operation on it, a peer.
    pub unsafe fn bytes(&self) -> &[u8] {
        let begin = self.inner.own * self.inner.stride;
        // SAFETY: by this function's promise.
        unsafe { self.inner.mapping.slice(begin..begin + self.inner.len) }
    }

    /// This rank's part, to write.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes the part, except the operation that it is given to.
    #[expect(clippy::mut_from_ref, reason = "the memory is lent to tensors; only the caller knows which are in use")]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        let begin = self.inner.own * self.inner.stride;
        // SAFETY: by this function's promise.
        unsafe { self.inner.mapping.slice_mut(begin..begin + self.inner.len) }
    }
}

/// An arena and where this rank's part of it lies.
type Entry = (Range<usize>, Weak<Inner>);

/// The arenas of a process, for those who must know whether a tensor lies in one.
#[derive(Debug, Default)]
pub struct Registry {
    /// How often `entries` changed: lets a [`Finder`] do without the lock.
    changes: AtomicU64,
    entries: Mutex<Vec<Entry>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        lock(&self.entries)
    }

    fn enter(&self, arena: &SharedArena) {
        let part = arena.address()..arena.address() + arena.len();
        let mut entries = self.lock();
        entries.push((part, Arc::downgrade(&arena.inner)));
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn forget(&self) {
        let mut entries = self.lock();
        // Whoever drops the last clone comes here when it can no longer be upgraded.
        entries.retain(|(_, arena)| arena.strong_count() > 0);
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// Finds the arena of a tensor. One per thread of operations.
#[derive(Debug, Default)]
pub struct Finder {
    registry: Arc<Registry>,
    /// `changes` when `known` was copied.
    seen: u64,
    known: Vec<Entry>,
}

impl Finder {
    /// A finder in this registry.
    pub fn new(registry: Arc<Registry>) -> Finder {
        Finder { registry, seen: 0, known: Vec::new() }
    }

    /// The shared arena in which these bytes lie, and where in this rank's part they begin. Whoever lends the bytes keeps the
    /// arena alive meanwhile, so one that has just been freed is not theirs.
    pub fn find(&mut self, bytes: &[u8]) -> Option<(SharedArena, usize)> {
        if self.registry.changes.load(Ordering::Acquire) != self.seen {
            let entries = self.registry.lock();
            self.seen = self.registry.changes.load(Ordering::Acquire);
            self.known.clone_from(&entries);
        }
        let begin = bytes.as_ptr() as usize;
        let holds = |part: &Range<usize>| part.contains(&begin) && bytes.len() <= part.end - begin;
        let (part, arena) = self.known.iter().find(|(part, _)| holds(part))?;
        Some((SharedArena { inner: arena.upgrade()? }, begin - part.start))
    }
}

#[cfg(test)]
mod tests {
    use rustix::param::page_size;

    use super::*;

    /// The views of two ranks on one arena.
    fn pair(id: u64, len: usize, registry: &Arc<Registry>) -> [SharedArena; 2] {
        let first = Arena::create("bagua-test", 2 * part_stride(len, 2).unwrap()).unwrap();
        let second = Arena::from_fd(first.fd().try_clone_to_owned().unwrap()).unwrap();
        let view = |file, own| SharedArena::shared(file, id, vec![4, 7], own, len, registry).unwrap();
        [view(first, 0), view(second, 1)]
    }

    #[test]
    fn each_rank_has_a_part_and_sees_the_others() {
        let (registry, page) = (Arc::default(), page_size());
        let [mine, theirs] = pair(1, page + 1, &registry);
        assert_eq!((mine.part(4), theirs.part(7)), (Some(0..page + 1), Some(2 * page..3 * page + 1)));
        assert_eq!(mine.part(5), None);
        // SAFETY: one thread, one slice at a time.
        unsafe { theirs.bytes_mut()[page] = 9 };
        // SAFETY: as above.
        assert_eq!(unsafe { mine.mapping().slice(3 * page..3 * page + 1) }, [9]);
        // SAFETY: as above.
        assert_eq!(unsafe { mine.bytes()[page] }, 0);
    }

    #[test]
    fn a_tensor_is_found_in_its_arena_and_not_beside_it() {
        let registry = Arc::default();
        let mut finder = Finder::new(Arc::clone(&registry));
        let [mine, _theirs] = pair(1, 1000, &registry);
        let [second, _] = pair(2, 1000, &registry);
        // SAFETY: nobody writes.
        let (bytes, others) = unsafe { (mine.bytes(), second.bytes()) };
        let found = |finder: &mut Finder, bytes: &[u8]| finder.find(bytes).map(|(arena, at)| (arena.id().unwrap(), at));
        assert_eq!(found(&mut finder, &bytes[8..1000]), Some((1, 8)));
        assert_eq!(found(&mut finder, &others[..1]), Some((2, 0)));
        assert_eq!(found(&mut finder, &[0; 8]), None);
        // SAFETY: nobody writes; the rest of the page belongs to the part's stride.
        let beyond = unsafe { mine.mapping().slice(8..1001) };
        assert_eq!(found(&mut finder, beyond), None);
    }

    #[test]
    fn memory_that_was_freed_is_not_found_and_no_longer_mapped() {
        let registry = Arc::default();
        let mut finder = Finder::new(Arc::clone(&registry));
        let [mine, theirs] = pair(1, 64 * page_size(), &registry);
        let address = mine.address();
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_mapped = || maps().lines().any(|line| line.starts_with(&format!("{address:x}-")));
        let clone = mine.clone();
        drop(mine);
        assert!(is_mapped());
        drop(clone);
        assert!(!is_mapped());
        // SAFETY: nobody writes.
        assert!(finder.find(unsafe { theirs.bytes() }).is_some());
        assert_eq!(registry.lock().len(), 1);
    }

    #[test]
    fn every_page_is_there_before_it_is_touched() {
        let registry = Arc::default();
        let [mine, _theirs] = pair(1, 64 * page_size(), &registry);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split_once(&format!("{:x}-", mine.mapping().pointer() as usize)).unwrap().1;
        let resident = own.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap().trim();
        assert_eq!(resident, format!("{} kB", 2 * 64 * page_size() / 1024));
    }

    #[test]
    fn ranks_that_ask_for_different_sizes_are_told() {
        let registry = Arc::default();
        let file = Arena::create("bagua-test", 2 * page_size()).unwrap();
        let outcome = SharedArena::shared(file, 1, vec![0, 1], 1, page_size() + 1, &registry);
        assert!(matches!(outcome, Err(Error::Mismatch(_))));
    }

    #[test]
    fn a_size_beyond_the_address_space_is_refused() {
        assert!(matches!(part_stride(usize::MAX, 1), Err(Error::InvalidArgument(_))));
        assert!(matches!(part_stride(usize::MAX / 4, 3), Err(Error::InvalidArgument(_))));
        assert_eq!(part_stride(0, 2).unwrap(), page_size());
    }
}
