//! Memory and events that processes share: a rank's own, and those of its peers.

use std::sync::Arc;

use bagua_core::error::Result;

use crate::api::{CUdeviceptr, IpcHandle};
use crate::context::Context;
use crate::event::Event;

/// Windows of a rank, which are used in turn.
pub(super) const TURNS: usize = 2;

/// Shared events of a rank.
pub(super) const EVENTS: usize = 3 * TURNS;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: a device gets access to its peer's memory when that is needed. The driver takes no other.
const LAZY_PEER_ACCESS: u32 = 1;

/// By what the others find what a rank shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Number of the process.
    pub(super) process: u32,
    /// Number of its file of the book of who has memory open; that of the host's first rank counts.
    pub(super) book: i32,
    /// Of the memory of both windows.
    pub(super) memory: IpcHandle,
    /// In the order of [`Signals::names`].
    pub(super) events: [IpcHandle; EVENTS],
}

/// Memory of this rank that others may read: both windows. Who holds it makes sure that nothing uses it when it is dropped, in any process.
pub(super) struct Window {
    context: Arc<Context>,
    address: CUdeviceptr,
    /// Bytes of each of the two.
    bytes: usize,
}

impl Window {
    /// Windows of so many bytes, not 0.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Window> {
        let _entered = context.enter()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: it writes one address, of the current context's device.
        let code = unsafe { (context.api().functions.alloc)(&raw mut address, TURNS * bytes) };
        context.check(c"cuMemAlloc", code)?;
        Ok(Window { context: Arc::clone(context), address, bytes })
    }

    /// Its name for other processes.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn name(&self) -> Result<IpcHandle> {
        let _entered = self.context.enter()?;
        let mut name = IpcHandle([0; 64]);
        // SAFETY: it writes one name; the memory is ours.
        let code = unsafe { (self.context.api().functions.ipc_name_memory)(&raw mut name, self.address) };
        self.context.check(c"cuIpcGetMemHandle", code).map(|()| name)
    }

    /// Bytes of a window.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of a window.
    pub(super) fn address(&self, turn: usize) -> usize {
        self.address as usize + turn * self.bytes
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // As in `Event::drop`.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: nothing uses it: the promise at the type.
            unsafe { (self.context.api().functions.free)(self.address) };
        }
    }
}

/// Memory of another rank that is open here. Who holds it makes sure that no work of this process uses it when it is dropped.
pub(super) struct Opened {
    context: Arc<Context>,
    address: CUdeviceptr,
}

impl Opened {
    /// Opens it for the device of a context.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn new(context: &Arc<Context>, name: IpcHandle) -> Result<Opened> {
        let _entered = context.enter()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: it writes one address; the driver refuses names that are none.
        let code = unsafe { (context.api().functions.ipc_open_memory)(&raw mut address, name, LAZY_PEER_ACCESS) };
        context.check(c"cuIpcOpenMemHandle", code)?;
        Ok(Opened { context: Arc::clone(context), address })
    }

    /// Address of a window of so many bytes.
    pub(super) fn address(&self, turn: usize, bytes: usize) -> usize {
        self.address as usize + turn * bytes
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // As in `Event::drop`.
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: opened, once, and no work of ours uses it: the promise at the type.
            unsafe { (self.context.api().functions.ipc_close_memory)(self.address) };
        }
    }
}

/// The shared events of a rank, for each of its windows.
pub(super) struct Signals {
    /// Its window has what the rank contributes.
    pub(super) filled: [Event; TURNS],
    /// Its window has the share that it reduced.
    pub(super) made: [Event; TURNS],
    /// The rank has read all that it needs of the others' windows.
    pub(super) free: [Event; TURNS],
}

impl Signals {
    fn of(mut next: impl FnMut(usize) -> Result<Event>) -> Result<Signals> {
        let mut pair = |first: usize| -> Result<[Event; TURNS]> { Ok([next(first)?, next(first + 1)?]) };
        Ok(Signals { filled: pair(0)?, made: pair(TURNS)?, free: pair(2 * TURNS)? })
    }

    /// This rank's.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn new(context: &Arc<Context>) -> Result<Signals> {
        Signals::of(|_| Event::shared(context))
    }

    /// Another rank's.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn open(context: &Arc<Context>, names: &[IpcHandle; EVENTS]) -> Result<Signals> {
        Signals::of(|nth| Event::open(context, names[nth]))
    }

    /// Names for other processes.
    ///
    /// # Errors
    /// `Device`.
    pub(super) fn names(&self) -> Result<[IpcHandle; EVENTS]> {
        let mut names = [IpcHandle([0; 64]); EVENTS];
        let all = self.filled.iter().chain(&self.made).chain(&self.free);
        for (name, event) in names.iter_mut().zip(all) {
            *name = event.name()?;
        }
        Ok(names)
    }
}
