//! Tensor memory in which peers on the same host can work in place.
//!
//! Each rank creates and frees its own arenas, in anonymous files, without its peers. The ranks of a lane map each
//! other's arenas the first time they use tensors in them (see `bagua_collectives::shm`). A mapping stays valid even
//! after the peer that owns the arena has freed it.

use std::ops::{Deref, Range};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::arena::Arena;
use super::mapping::Mapping;
use crate::error::{Error, Result};
use crate::wait::lock;

/// An arena of this rank that is freed on drop. This is the only handle that gives access to the bytes.
///
/// If no peer shares memory with this rank, the memory is private, so that callers need not distinguish the two cases.
#[derive(Debug)]
pub struct SharedArena {
    known: KnownArena,
}

/// A handle to an arena without access to its bytes, as returned by a [`Finder`]. Keeps the memory alive.
#[derive(Clone, Debug)]
pub struct KnownArena {
    inner: Arc<Inner>,
}

impl Deref for SharedArena {
    type Target = KnownArena;

    fn deref(&self) -> &KnownArena {
        &self.known
    }
}

#[derive(Debug)]
struct Inner {
    memory: Memory,
    /// Number of bytes requested.
    len: usize,
    /// For each lane, the peers' arenas that were mapped together with this one. They are unmapped with it.
    mapped: Mutex<Vec<(LaneId, Mapped)>>,
    /// Registry that must forget this memory before it is unmapped.
    registry: Arc<Registry>,
}

#[derive(Debug)]
enum Memory {
    Shared(Arena),
    Private(Mapping),
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The fields, and with them the mapping, are dropped after this.
        self.registry.forget();
    }
}

/// The identity of a lane within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneId(u64);

impl LaneId {
    /// Returns an id that no other lane has.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> LaneId {
        static LANES: AtomicU64 = AtomicU64::new(0);
        LaneId(LANES.fetch_add(1, Ordering::Relaxed))
    }
}

/// The state of an arena in one lane.
#[derive(Clone, Debug)]
pub enum Mapped {
    /// The arena is not mapped in this lane yet.
    No,
    /// The arena will never be mapped in this lane, because a rank failed to map one of the arenas.
    Refused,
    /// All ranks of the lane have mapped the arena. It starts at this offset in its rank's part.
    In(Arc<MappedArenas>, usize),
}

/// The arenas that all ranks of a lane on this host have mapped together.
#[derive(Debug)]
pub struct MappedArenas {
    /// Identifies this set. Equal on these ranks, and unique within the lane.
    id: u64,
    /// The arenas of each peer, one after the other, indexed by rank on this host. Empty for this rank, whose arenas
    /// are already mapped.
    peers: Vec<Vec<(Range<usize>, Mapping)>>,
}

impl MappedArenas {
    /// Maps the peers' arenas. Descriptors are indexed by rank on this host, and ordered as their rank sent them.
    ///
    /// # Errors
    /// `System` if a descriptor is missing or cannot be mapped.
    pub fn new(id: u64, peers: Vec<Vec<Option<OwnedFd>>>) -> Result<MappedArenas> {
        let map = |arenas: Vec<Option<OwnedFd>>| {
            let mut end = 0;
            let mut one = |descriptor: Option<OwnedFd>| {
                let descriptor =
                    descriptor.ok_or_else(|| Error::other("did not receive the descriptor of a peer's arena"))?;
                let mapping = Arena::from_fd(descriptor)?.into_mapping();
                mapping.populate(0..mapping.len())?;
                let begin = end;
                end += mapping.len();
                Ok((begin..end, mapping))
            };
            arenas.into_iter().map(&mut one).collect::<Result<_>>()
        };
        Ok(MappedArenas { id, peers: peers.into_iter().map(map).collect::<Result<_>>()? })
    }

    /// Returns the id of this set.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the mapping with these `len` bytes of a peer's part, and their offset in the mapping. `None` if the
    /// bytes are not within one arena.
    pub fn find(&self, rank: usize, offset: usize, len: usize) -> Option<(&Mapping, usize)> {
        let holds = |range: &Range<usize>| range.contains(&offset) && len <= range.end - offset;
        let (range, mapping) = self.peers.get(rank)?.iter().find(|(range, _)| holds(range))?;
        Some((mapping, offset - range.start))
    }
}

impl SharedArena {
    /// Creates `len` zeroed and populated bytes that peers can map. `label` shows in `/proc/<pid>/maps`.
    ///
    /// # Errors
    /// `InvalidArgument` if the size does not fit the address space, `System` if memory or descriptors are short.
    pub fn new(label: &str, len: usize, registry: &Arc<Registry>) -> Result<SharedArena> {
        let arena = Arena::create(label, fitting(len)?)?;
        arena.mapping().populate(0..arena.len())?;
        let arena = SharedArena::over_memory(Memory::Shared(arena), len, registry);
        registry.enter(&arena);
        Ok(arena)
    }

    /// Creates `len` zeroed and populated bytes that only this process can access. Returns the errors of
    /// [`SharedArena::new`].
    pub fn private(len: usize, registry: &Arc<Registry>) -> Result<SharedArena> {
        let mapping = Mapping::private(fitting(len)?)?;
        mapping.populate(0..mapping.len())?;
        Ok(SharedArena::over_memory(Memory::Private(mapping), len, registry))
    }

    fn over_memory(memory: Memory, len: usize, registry: &Arc<Registry>) -> SharedArena {
        let (mapped, registry) = (Mutex::default(), Arc::clone(registry));
        SharedArena { known: KnownArena { inner: Arc::new(Inner { memory, len, mapped, registry }) } }
    }

    /// Returns the first byte, which is aligned to a page.
    pub fn pointer(&self) -> *mut u8 {
        self.mapping().pointer()
    }

    /// Returns the bytes.
    ///
    /// # Safety
    /// While the slice exists, no code may write to the bytes: neither this process nor a peer's operation.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: by this function's promise.
        unsafe { self.mapping().slice(0..self.len()) }
    }

    /// Returns the bytes for writing.
    ///
    /// # Safety
    /// While the slice exists, no other code may read or write the bytes, except an operation that gets the slice.
    #[expect(clippy::mut_from_ref, reason = "tensors use the memory; only the caller knows which are in use")]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: by this function's promise.
        unsafe { self.mapping().slice_mut(0..self.len()) }
    }
}

impl KnownArena {
    /// Returns the number of bytes requested.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// True if no bytes were requested.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if peers can map this memory.
    pub fn is_shared(&self) -> bool {
        self.fd().is_some()
    }

    /// Returns the descriptor to send to a peer, or `None` for private memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.inner.memory {
            Memory::Shared(arena) => Some(arena.fd()),
            Memory::Private(_) => None,
        }
    }

    /// Returns whether, and at which offset, this arena is mapped in a lane.
    pub fn mapped(&self, lane: LaneId) -> Mapped {
        let mapped = lock(&self.inner.mapped);
        mapped.iter().find(|(known, _)| *known == lane).map_or(Mapped::No, |(_, mapped)| mapped.clone())
    }

    fn set_mapped(&self, lane: LaneId, now: Option<Mapped>) {
        let before: Vec<_> = {
            let mut mapped = lock(&self.inner.mapped);
            let before = mapped.extract_if(.., |(known, _)| *known == lane).collect();
            mapped.extend(now.map(|now| (lane, now)));
            before
        };
        // Unmap the replaced mapping only after the lock is released.
        drop(before);
    }

    fn mapping(&self) -> &Mapping {
        match &self.inner.memory {
            Memory::Shared(arena) => arena.mapping(),
            Memory::Private(mapping) => mapping,
        }
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> usize {
        self.mapping().pointer() as usize
    }
}

/// Rounds up to whole pages, at least one.
fn fitting(len: usize) -> Result<usize> {
    let pages = len.max(1).checked_next_multiple_of(rustix::param::page_size());
    pages
        .filter(|pages| isize::try_from(*pages).is_ok())
        .ok_or_else(|| Error::InvalidArgument(format!("{len} bytes do not fit the address space")))
}

type Entry = (Range<usize>, Weak<Inner>);

/// The shared arenas of a rank, which tell whether a tensor lies in shared memory.
#[derive(Debug, Default)]
pub struct Registry {
    /// Number of changes of `entries`, so that a [`Finder`] needs the lock only after a change.
    changes: AtomicU64,
    entries: Mutex<Vec<Entry>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        lock(&self.entries)
    }

    fn enter(&self, arena: &KnownArena) {
        let place = arena.address()..arena.address() + arena.len();
        let mut entries = self.lock();
        entries.push((place, Arc::downgrade(&arena.inner)));
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn forget(&self) {
        let mut entries = self.lock();
        // When the last clone is dropped, its weak references can no longer be upgraded.
        entries.retain(|(_, arena)| arena.strong_count() > 0);
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn arenas(&self) -> Vec<KnownArena> {
        // The caller drops these without the lock, because dropping a last clone takes the lock.
        self.lock().iter().filter_map(|(_, arena)| Some(KnownArena { inner: arena.upgrade()? })).collect()
    }

    /// Returns this rank's arenas that a lane has mapped in one of these sets.
    pub fn mapped_as(&self, lane: LaneId, ids: &[u64]) -> Vec<KnownArena> {
        let wanted = |arena: &KnownArena| match arena.mapped(lane) {
            Mapped::In(known, _) => ids.contains(&known.id()),
            Mapped::No | Mapped::Refused => false,
        };
        self.arenas().into_iter().filter(wanted).collect()
    }

    /// Unmaps all arenas of a lane's peers, when the lane ends.
    pub fn unmap(&self, lane: LaneId) {
        self.arenas().iter().for_each(|arena| arena.set_mapped(lane, None));
    }

    /// Marks this rank's arenas, in the order in which their descriptors were sent, as mapped by all ranks of the lane.
    /// If `all` is `None`, a rank failed to map the arenas, and they are marked as refused.
    pub fn set_mapped(&self, lane: LaneId, own: &[KnownArena], all: Option<&Arc<MappedArenas>>) {
        let mut offset = 0;
        for arena in own {
            let now = all.map_or(Mapped::Refused, |all| Mapped::In(Arc::clone(all), offset));
            arena.set_mapped(lane, Some(now));
            offset += arena.mapping().len();
        }
    }
}

/// A lookup from tensor to arena. Every thread that runs operations has one.
#[derive(Debug, Default)]
pub struct Finder {
    registry: Arc<Registry>,
    /// Value of `changes` when `known` was copied.
    seen: u64,
    known: Vec<Entry>,
}

impl Finder {
    /// Creates a finder in this registry.
    pub fn new(registry: Arc<Registry>) -> Finder {
        Finder { registry, seen: 0, known: Vec::new() }
    }

    /// Returns the shared arena that contains these bytes, and their offset in it. The owner of the bytes keeps their
    /// arena alive during the call, so an arena that was just freed cannot be the one.
    pub fn find(&mut self, bytes: &[u8]) -> Option<(KnownArena, usize)> {
        if self.registry.changes.load(Ordering::Acquire) != self.seen {
            let entries = self.registry.lock();
            self.seen = self.registry.changes.load(Ordering::Acquire);
            self.known.clone_from(&entries);
        }
        let begin = bytes.as_ptr() as usize;
        let holds = |place: &Range<usize>| place.contains(&begin) && bytes.len() <= place.end - begin;
        let (place, arena) = self.known.iter().find(|(place, _)| holds(place))?;
        Some((KnownArena { inner: arena.upgrade()? }, begin - place.start))
    }
}

#[cfg(test)]
mod tests {
    use rustix::param::page_size;

    use super::*;

    fn arena(len: usize, registry: &Arc<Registry>) -> SharedArena {
        SharedArena::new("bagua-test", len, registry).unwrap()
    }

    /// Returns the set that the first of two ranks has after both have sent each other these arenas.
    fn mapped_by_first(lane: LaneId, own: &[&SharedArena], theirs: &[&SharedArena]) -> Arc<MappedArenas> {
        let sent = theirs.iter().map(|arena| Some(arena.fd().unwrap().try_clone_to_owned().unwrap())).collect();
        let all = Arc::new(MappedArenas::new(7, vec![Vec::new(), sent]).unwrap());
        let own: Vec<KnownArena> = own.iter().map(|arena| arena.known.clone()).collect();
        own[0].inner.registry.set_mapped(lane, &own, Some(&all));
        all
    }

    fn maps(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.starts_with(&format!("{address:x}-")))
    }

    #[test]
    fn peers_see_the_arenas_of_a_rank_one_after_the_other() {
        let (registry, lane, page) = (Arc::default(), LaneId::new(), page_size());
        let [mine, other, first, second] = [3, page + 1, page + 1, 5].map(|len| arena(len, &registry));
        let all = mapped_by_first(lane, &[&mine, &other], &[&first, &second]);
        // SAFETY: one thread, one slice at a time.
        unsafe { second.bytes_mut()[1] = 9 };
        let (mapping, at) = all.find(1, 2 * page + 1, 4).unwrap();
        // SAFETY: as above.
        assert_eq!((at, unsafe { mapping.slice(at..at + 1) }), (1, &[9][..]));
        assert!(all.find(1, 2 * page - 1, 2).is_none(), "in one arena and in the next");
        assert!(all.find(1, 3 * page - 1, 2).is_none() && all.find(2, 0, 1).is_none() && all.find(0, 0, 1).is_none());
        let offset = |arena: &SharedArena| match arena.mapped(lane) {
            Mapped::In(all, offset) => (all.id(), offset),
            Mapped::No | Mapped::Refused => panic!("not mapped"),
        };
        assert_eq!((offset(&mine), offset(&other)), ((7, 0), (7, page)));
        assert!(matches!(mine.mapped(LaneId::new()), Mapped::No));
        assert_eq!(registry.mapped_as(lane, &[1, 7]).len(), 2);
        assert!(registry.mapped_as(lane, &[1]).is_empty());
    }

    #[test]
    fn the_arenas_of_peers_are_unmapped_with_the_own_one_or_with_the_lane() {
        let (registry, lane) = (Arc::default(), LaneId::new());
        for by_lane in [false, true] {
            let (mine, theirs) = (arena(1, &registry), arena(1, &registry));
            let all = mapped_by_first(lane, &[&mine], &[&theirs]);
            let address = all.find(1, 0, 1).unwrap().0.pointer() as usize;
            drop(all);
            assert!(maps(address));
            if by_lane {
                registry.unmap(lane);
                assert!(!maps(address) && matches!(mine.mapped(lane), Mapped::No));
            }
            drop(mine);
            assert!(!maps(address));
        }
    }

    #[test]
    fn a_peer_keeps_what_it_has_mapped_of_an_arena_that_is_gone() {
        let (registry, lane) = (Arc::default(), LaneId::new());
        let (mine, theirs) = (arena(1, &registry), arena(1, &registry));
        // SAFETY: one thread, one slice at a time.
        unsafe { theirs.bytes_mut()[0] = 4 };
        let all = mapped_by_first(lane, &[&mine], &[&theirs]);
        drop(theirs);
        // SAFETY: as above.
        assert_eq!(unsafe { all.find(1, 0, 1).unwrap().0.slice(0..1) }, [4]);
    }

    #[test]
    fn a_tensor_is_found_in_its_arena_and_not_beside_it() {
        let registry = Arc::default();
        let mut finder = Finder::new(Arc::clone(&registry));
        let (mine, second) = (arena(1000, &registry), arena(1000, &registry));
        // SAFETY: no code writes.
        let (bytes, others) = unsafe { (mine.bytes(), second.bytes()) };
        let mut found = |bytes: &[u8]| finder.find(bytes).map(|(arena, at)| (arena.address(), at));
        assert_eq!(found(&bytes[8..1000]), Some((mine.address(), 8)));
        assert_eq!(found(&others[..1]), Some((second.address(), 0)));
        assert_eq!(found(&[0; 8]), None);
        // SAFETY: no code writes; the rest of the page belongs to the arena's mapping.
        let beyond = unsafe { mine.mapping().slice(8..1001) };
        assert_eq!(found(beyond), None);
    }

    #[test]
    fn memory_that_was_freed_is_not_found_and_no_longer_mapped() {
        let registry = Arc::default();
        let mut finder = Finder::new(Arc::clone(&registry));
        let (mine, kept) = (arena(64 * page_size(), &registry), arena(1, &registry));
        let (address, clone) = (mine.address(), mine.known.clone());
        drop(mine);
        assert!(maps(address));
        drop(clone);
        assert!(!maps(address));
        // SAFETY: no code writes.
        assert!(finder.find(unsafe { kept.bytes() }).is_some());
        assert_eq!(registry.lock().len(), 1);
    }

    #[test]
    fn every_page_is_there_before_it_is_touched() {
        let mine = arena(64 * page_size(), &Arc::default());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split_once(&format!("{:x}-", mine.address())).unwrap().1;
        let resident = own.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap().trim();
        assert_eq!(resident, format!("{} kB", 64 * page_size() / 1024));
    }

    #[test]
    fn an_arena_without_a_descriptor_is_refused() {
        assert!(matches!(MappedArenas::new(2, vec![vec![None]]), Err(Error::System { .. })));
    }

    #[test]
    fn a_size_beyond_the_address_space_is_refused() {
        let registry = Arc::default();
        for len in [usize::MAX, usize::MAX / 2 + 1] {
            assert!(matches!(SharedArena::new("bagua-test", len, &registry), Err(Error::InvalidArgument(_))));
            assert!(matches!(SharedArena::private(len, &registry), Err(Error::InvalidArgument(_))));
        }
        assert_eq!(fitting(0).unwrap(), page_size());
    }
}
