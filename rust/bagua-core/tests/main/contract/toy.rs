//! The toy device: memory that the host cannot read, and the collective that works on it. Read this device first.
//!
//! The memory is a mapping without access rights. Only the copy functions open it, for the length of the copy, so any
//! other access ends the process. The collective copies to the host, runs the host's collective, and copies back, as a
//! staged collective of a real device does.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use bagua_core::collective::{Collective, CollectiveFactory, Incoming, Io, OpContext, Outgoing, Verb, over_exchange};
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Buffer, BufferMut, Device, DeviceRef, Region};
use bagua_core::request::Uses;
use bagua_core::same_ranks_as;
use bagua_core::types::DType;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::world::{Ranks, hier, local, shm};

/// Kind of the toy device in fingerprints.
pub const KIND: u8 = 200;

/// The toy device, see the module.
#[derive(Debug)]
pub struct Toy {
    name: String,
    /// Held during a copy. If two copies ran on one page, the first to end would close the page for the other.
    copying: Mutex<()>,
    /// Calls of the device's methods for buckets.
    calls: Mutex<Vec<String>>,
    /// Memory for steps of operations.
    room: Mutex<Option<Mapping>>,
}

impl Toy {
    /// Number of a stream that the device refuses to follow.
    pub const REFUSED: usize = 99;

    pub fn device(index: usize) -> Arc<dyn Device> {
        Arc::new(Toy {
            name: format!("toy:{index}"),
            copying: Mutex::default(),
            calls: Mutex::default(),
            room: Mutex::default(),
        })
    }

    /// Returns the calls of a toy device's methods for buckets.
    pub fn calls(device: &Arc<dyn Device>) -> Vec<String> {
        let device: &dyn Any = &**device;
        device.downcast_ref::<Toy>().unwrap().calls.lock().unwrap().clone()
    }

    fn log(&self, what: &str, stream: Option<usize>) -> Result<()> {
        if stream == Some(Toy::REFUSED) {
            return Err(Error::NotImplemented("that stream cannot be followed".to_owned()));
        }
        let stream = stream.map_or_else(|| "own".to_owned(), |stream| stream.to_string());
        self.calls.lock().unwrap().push(format!("{what} {stream}"));
        Ok(())
    }

    /// Runs `copy` while the pages of `len` bytes at `at` have these access rights.
    fn open(&self, at: NonNull<u8>, len: usize, rights: MprotectFlags, copy: impl FnOnce()) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let page = rustix::param::page_size();
        let first = at.as_ptr() as usize / page * page;
        let bytes = (at.as_ptr() as usize + len).next_multiple_of(page) - first;
        let _one = self.copying.lock().map_err(|_| Error::other("a copy of the toy device panicked"))?;
        let failed = |e| Error::system("mprotect", std::io::Error::from(e));
        // SAFETY: the pages belong to one allocation of this device, and nothing in them is borrowed.
        unsafe { mprotect(first as *mut _, bytes, rights) }.map_err(failed)?;
        copy();
        // SAFETY: as above.
        unsafe { mprotect(first as *mut _, bytes, MprotectFlags::empty()) }.map_err(failed)
    }
}

impl Device for Toy {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> u8 {
        KIND
    }

    unsafe fn copy_to_host(&self, from: NonNull<u8>, into: &mut [u8]) -> Result<()> {
        self.open(from, into.len(), MprotectFlags::READ, || {
            // SAFETY: the caller's promise; the pages are readable now.
            unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut into[0]), into.len()) }
        })
    }

    unsafe fn copy_from_host(&self, from: &[u8], to: NonNull<u8>) -> Result<()> {
        self.open(to, from.len(), MprotectFlags::READ | MprotectFlags::WRITE, || {
            // SAFETY: the caller's promise; the pages are writable now.
            unsafe { to.copy_from_nonoverlapping(NonNull::from(&from[0]), from.len()) }
        })
    }

    fn room(&self, len: usize) -> Result<NonNull<u8>> {
        Ok(NonNull::new(self.room.lock().unwrap().insert(Mapping::new(len)).at.cast()).unwrap())
    }

    fn prepare(&self) -> Result<()> {
        self.calls.lock().unwrap().push("prepare".to_owned());
        Ok(())
    }

    fn mark(&self, stream: Option<usize>) -> Result<()> {
        self.log("mark", stream)
    }

    fn order(&self, stream: Option<usize>) -> Result<()> {
        self.log("order", stream)
    }

    fn finish(&self) -> Result<()> {
        self.calls.lock().unwrap().push("finish".to_owned());
        Ok(())
    }

    fn end(&self) {
        self.calls.lock().unwrap().push("end".to_owned());
    }
}

/// Pages without access rights.
#[derive(Debug)]
struct Mapping {
    at: *mut std::ffi::c_void,
    bytes: usize,
}

// SAFETY: plain memory.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(len: usize) -> Mapping {
        let bytes = len.max(1).next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping, which nothing refers to.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) }.unwrap();
        Mapping { at, bytes }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whose buffers are all gone.
        unsafe { munmap(self.at, self.bytes) }.unwrap();
    }
}

/// Bytes of the toy device.
pub struct ToyMemory {
    region: Region,
    _mapping: Mapping,
}

impl ToyMemory {
    /// A copy of these bytes.
    pub fn of(device: &Arc<dyn Device>, bytes: &[u8]) -> ToyMemory {
        let mapping = Mapping::new(bytes.len());
        // SAFETY: the mapping lives as long as this value, and only the device's copy functions reach it.
        let region = unsafe { Region::on(Arc::clone(device), mapping.at.cast(), bytes.len(), DType::U8) }.unwrap();
        let mut memory = ToyMemory { region, _mapping: mapping };
        memory.region.buffer_mut().copy_from(bytes).unwrap();
        memory
    }

    pub fn buffer(&self) -> Buffer<'_> {
        self.region.buffer()
    }

    pub fn buffer_mut(&mut self) -> BufferMut<'_> {
        self.region.buffer_mut()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut host = vec![0; self.region.len()];
        self.region.buffer().copy_to(&mut host).unwrap();
        host
    }

    pub fn address(&self) -> usize {
        self.region.address()
    }
}

/// Collectives on toy memory, over the host's.
struct Staged(Box<dyn Collective>);

fn on_host(buffer: Buffer<'_>) -> Result<Vec<u8>> {
    let mut host = vec![0; buffer.len()];
    buffer.copy_to(&mut host)?;
    Ok(host)
}

impl Collective for Staged {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn transports(&self) -> Vec<&'static str> {
        self.0.transports()
    }

    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        place.is_none_or(|device| device.kind() == KIND)
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        if verb.is_over_exchange() {
            return over_exchange(self, cx, verb, io);
        }
        if io.device()?.is_none() {
            return self.0.run(cx, verb, io);
        }
        match io {
            Io::InPlace(mut data) => {
                let mut host = on_host(data.as_buffer())?;
                self.0.run(cx, verb, Io::in_place(&mut host))?;
                data.copy_from(&host)
            }
            Io::Split { src, mut dst } => {
                let (from, mut to) = (on_host(src)?, vec![0; dst.len()]);
                self.0.run(cx, verb, Io::split(&from, &mut to))?;
                if verb.uses(self.rank()) == Uses::SourceOnly { Ok(()) } else { dst.copy_from(&to) }
            }
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let given: Vec<_> = sends.iter().map(|message| on_host(message.data)).collect::<Result<_>>()?;
        let mut got: Vec<_> = recvs.iter().map(|message| vec![0; message.data.len()]).collect();
        let outgoing: Vec<_> =
            sends.iter().zip(&given).map(|(m, data)| Outgoing::new(m.peer, m.fingerprint, data)).collect();
        let mut incoming: Vec<_> =
            recvs.iter().zip(&mut got).map(|(m, data)| Incoming::new(m.peer, m.fingerprint, data)).collect();
        self.0.exchange(cx, &outgoing, &mut incoming)?;
        recvs.iter_mut().zip(&got).try_for_each(|(message, data)| message.data.copy_from(data))
    }
}

/// Factory of [`Staged`] collectives.
#[derive(Debug)]
pub struct ToyFactory;

impl CollectiveFactory for ToyFactory {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn device(&self) -> u8 {
        KIND
    }

    fn wrap(&self, inner: Box<dyn Collective>, hosts: &[Vec<usize>]) -> Box<dyn Collective> {
        assert_eq!(hosts.iter().map(Vec::len).sum::<usize>(), inner.size());
        Box::new(Staged(inner))
    }
}

/// A collective that takes host buffers and runs everything on copies of them in toy memory, so that the contract of
/// host memory applies to the toy device.
struct OnToy {
    staged: Box<dyn Collective>,
    device: Arc<dyn Device>,
}

impl Collective for OnToy {
    same_ranks_as!(self => self.staged);

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        match io {
            Io::InPlace(mut data) => {
                let mut memory = ToyMemory::of(&self.device, data.as_buffer().as_host()?);
                self.staged.run(cx, verb, Io::InPlace(memory.buffer_mut()))?;
                data.copy_from(&memory.bytes())
            }
            Io::Split { src, mut dst } => {
                let from = ToyMemory::of(&self.device, src.as_host()?);
                let mut to = ToyMemory::of(&self.device, dst.as_buffer().as_host()?);
                self.staged.run(cx, verb, Io::Split { src: from.buffer(), dst: to.buffer_mut() })?;
                dst.copy_from(&to.bytes())
            }
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let device = &self.device;
        let given: Vec<_> =
            sends.iter().map(|m| Ok(ToyMemory::of(device, m.data.as_host()?))).collect::<Result<_>>()?;
        let mut got: Vec<_> = recvs.iter().map(|m| ToyMemory::of(device, &vec![0; m.data.len()])).collect();
        let outgoing: Vec<_> =
            sends.iter().zip(&given).map(|(m, data)| Outgoing { data: data.buffer(), ..*m }).collect();
        let mut incoming: Vec<_> = recvs
            .iter()
            .zip(&mut got)
            .map(|(m, data)| Incoming { peer: m.peer, fingerprint: m.fingerprint, data: data.buffer_mut() })
            .collect();
        self.staged.exchange(cx, &outgoing, &mut incoming)?;
        drop(incoming);
        recvs.iter_mut().zip(&got).try_for_each(|(message, data)| message.data.copy_from(&data.bytes()))
    }
}

fn on_toy(ranks: Ranks, size: usize) -> Vec<Box<dyn Collective>> {
    let wrap = |(rank, inner): (usize, Box<dyn Collective>)| {
        let staged = ToyFactory.wrap(inner, &[(0..size).collect()]);
        Box::new(OnToy { staged, device: Toy::device(rank) }) as Box<dyn Collective>
    };
    ranks(size).into_iter().enumerate().map(wrap).collect()
}

/// The toy device over streams between threads.
pub fn toy_local(size: usize) -> Vec<Box<dyn Collective>> {
    on_toy(local, size)
}

/// The toy device over shared memory.
pub fn toy_shm(size: usize) -> Vec<Box<dyn Collective>> {
    on_toy(shm, size)
}

/// The toy device over hosts.
pub fn toy_hier(size: usize) -> Vec<Box<dyn Collective>> {
    on_toy(hier, size)
}
