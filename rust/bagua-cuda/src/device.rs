//! A device as the core knows it: one value per operation, which also says when the operation may begin on the device and when it is done.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bagua_core::error::{Error, Result};
use bagua_core::memory::{Device, DeviceRef};
use bagua_core::wait::{Waited, lock};

use crate::event::Event;
use crate::stage::{PIECE, Stage, wait_until_reached};

/// Kind of a CUDA device in fingerprints: DLPack's number.
pub const KIND: u8 = 2;

/// What the caller wants of the choice of a collective: `BAGUA_CUDA_COLLECTIVE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Wish {
    #[default]
    Auto,
    Nccl,
    Ipc,
    Staged,
}

impl Wish {
    /// All of them, by number.
    pub const ALL: [Wish; 4] = [Wish::Auto, Wish::Nccl, Wish::Ipc, Wish::Staged];

    /// As the variable names it.
    pub fn name(self) -> &'static str {
        match self {
            Wish::Auto => "auto",
            Wish::Nccl => "nccl",
            Wish::Ipc => "ipc",
            Wish::Staged => "staged",
        }
    }

    /// The wish of that name.
    pub fn named(name: &str) -> Option<Wish> {
        Wish::ALL.into_iter().find(|wish| wish.name() == name)
    }
}

/// How far the device's part of an operation has come, as the communication thread knows it.
const NOTHING_BEGAN: u8 = 0;
/// [`Place::done`] was recorded behind all copies.
const RECORDED: u8 = 1;
/// It could not be: nobody knows when the device is done.
const LOST: u8 = 2;

/// The device of one operation.
pub struct Place {
    name: String,
    stage: Arc<Stage>,
    /// What the caller wants of the choice.
    pub(crate) wish: Wish,
    /// The caller's stream.
    stream: usize,
    /// Other streams that have work on the arrays.
    producers: Vec<usize>,
    /// Recorded on these streams when the operation was called: it begins after them.
    start: Mutex<Vec<Event>>,
    /// Recorded behind the operation's last copy.
    done: Arc<Event>,
    state: AtomicU8,
}

impl Place {
    /// The device of an operation that begins after the work of `stream` and of `producers`, and that `stream` is ordered after by default.
    ///
    /// # Errors
    /// `NotImplemented` for a stream that is being captured; `Device`.
    pub fn new(stage: &Arc<Stage>, wish: Wish, stream: usize, producers: Vec<usize>) -> Result<Place> {
        stage.release();
        stage.context().refuse_capture(&[stream])?;
        stage.context().refuse_capture(&producers)?;
        Ok(Place {
            name: format!("cuda:{}", stage.context().device()),
            wish,
            stream,
            producers,
            start: Mutex::default(),
            done: Arc::new(Event::new(stage.context())?),
            stage: Arc::clone(stage),
            state: AtomicU8::new(NOTHING_BEGAN),
        })
    }

    /// What its lane has on the device.
    pub fn stage(&self) -> &Arc<Stage> {
        &self.stage
    }

    /// The operation begins after what the streams have now. On the calling thread, which never waits for the device.
    ///
    /// # Errors
    /// `Device`.
    pub fn start(&self) -> Result<()> {
        let mut start = Vec::with_capacity(1 + self.producers.len());
        for stream in self.producers.iter().chain([&self.stream]) {
            let event = Event::new(self.stage.context())?;
            event.record(*stream)?;
            start.push(event);
        }
        *lock(&self.start) = start;
        Ok(())
    }

    /// The caller's stream begins after what the producers' streams have now, so that work may be put on it before `start`.
    ///
    /// # Errors
    /// `Device`.
    pub fn follow_producers(&self) -> Result<()> {
        for stream in &self.producers {
            let event = Event::new(self.stage.context())?;
            event.record(*stream)?;
            event.order(self.stream)?;
        }
        Ok(())
    }

    /// Copies within the device on the caller's stream.
    ///
    /// # Safety
    /// As [`crate::context::Context::copy`].
    pub unsafe fn copy(&self, to: usize, from: usize, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.stage.context().copy(to, from, bytes, self.stream) }
    }

    /// Puts work on the caller's stream, behind that of its producers, and marks its end on the device.
    ///
    /// # Errors
    /// Those of `work`, and `Device`.
    pub(crate) fn on_stream(&self, work: impl FnOnce(usize) -> Result<()>) -> Result<()> {
        self.follow_producers()?;
        let outcome = work(self.stream);
        // Also after an error: some of the work may be there.
        let recorded = self.done.record(self.stream);
        self.ended(recorded.is_ok());
        outcome.and(recorded)
    }

    /// Streams of ours begin after the operation's start.
    pub(crate) fn order_after_start(&self, streams: &[usize]) -> Result<()> {
        for event in lock(&self.start).iter() {
            streams.iter().try_for_each(|stream| event.order(*stream))?;
        }
        Ok(())
    }

    /// The operation's end on the device.
    pub(crate) fn done(&self) -> &Arc<Event> {
        &self.done
    }

    /// Whether `done` was recorded behind all copies.
    pub(crate) fn ended(&self, recorded: bool) {
        self.state.store(if recorded { RECORDED } else { LOST }, Ordering::Release);
    }

    /// Holds what the operation uses until the device is done with it. On the communication thread, when the host's part is over.
    pub fn keep(&self, what: Box<dyn Any + Send>) {
        match self.state.load(Ordering::Acquire) {
            NOTHING_BEGAN => drop(what),
            RECORDED => self.stage.hold(&self.done, what),
            _ => std::mem::forget(what),
        }
    }

    /// Work that `stream` (`None`: the call's) gets from now on sees the result. After the host's part; does not wait.
    ///
    /// # Errors
    /// `NotImplemented` for a stream that is being captured; `Device`.
    pub fn order(&self, stream: Option<usize>) -> Result<()> {
        let stream = stream.unwrap_or(self.stream);
        self.stage.context().refuse_capture(&[stream])?;
        self.done.order(stream)
    }

    /// Whether the device is done; after the host's part.
    pub fn is_done(&self) -> bool {
        self.done.is_reached().unwrap_or(true)
    }

    /// Waits until the device is done, for at most `limit`; after the host's part.
    pub fn wait_for(&self, limit: Duration) -> Waited<()> {
        let start = std::time::Instant::now();
        let mut late = false;
        let waited = wait_until_reached(&self.done, || {
            late = start.elapsed() >= limit;
            if late { Err(Error::other("late")) } else { Ok(()) }
        });
        if late && waited.is_err() { Waited::Pending } else { Waited::Done(waited) }
    }
}

/// The CUDA device behind a core's reference; `None` for the host and for other devices.
pub(crate) fn place_of(device: DeviceRef<'_>) -> Option<&Place> {
    let device: &dyn Any = &**device?;
    device.downcast_ref()
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Device for Place {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> u8 {
        KIND
    }

    unsafe fn copy_to_host(&self, from: NonNull<u8>, into: &mut [u8]) -> Result<()> {
        self.stage.copier(|copier| {
            self.order_after_start(&[copier.down.handle()])?;
            if let Some(last) = &copier.last {
                last.order(copier.down.handle())?;
            }
            for (number, piece) in into.chunks_mut(PIECE).enumerate() {
                let at = from.as_ptr() as usize + number * PIECE;
                // SAFETY: the caller's promise, and the copy is waited for below.
                unsafe { copier.input[0].fill(0..piece.len(), at, copier.down.handle()) }?;
                copier.arrived[0].record(copier.down.handle())?;
                wait_until_reached(&copier.arrived[0], || Ok(()))?;
                piece.copy_from_slice(copier.input[0].bytes(piece.len()));
            }
            self.stage.to_host.fetch_add(into.len() as u64, Ordering::Relaxed);
            Ok(())
        })
    }

    unsafe fn copy_from_host(&self, from: &[u8], to: NonNull<u8>) -> Result<()> {
        self.stage.copier(|copier| {
            let up = copier.up.handle();
            self.order_after_start(&[up])?;
            for (number, piece) in from.chunks(PIECE).enumerate() {
                wait_until_reached(&copier.left[0], || Ok(()))?;
                copier.output[0].bytes_mut(piece.len()).copy_from_slice(piece);
                let at = to.as_ptr() as usize + number * PIECE;
                // SAFETY: the caller's promise, and the copy is waited for below.
                unsafe { copier.output[0].spill(0..piece.len(), at, up) }?;
                copier.left[0].record(up)?;
            }
            wait_until_reached(&copier.left[0], || Ok(()))?;
            self.stage.to_device.fetch_add(from.len() as u64, Ordering::Relaxed);
            Ok(())
        })
    }
}
