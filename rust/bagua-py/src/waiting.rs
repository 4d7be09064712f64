//! Waiting without the GIL, and hearing Ctrl-C while doing so.
//!
//! Three kinds of wait:
//! - for a handle or an engine ([`in_slices`]): in slices, and between them Python's signal handlers run;
//! - for work that knows no group yet ([`aside`]): the work runs on a thread of its own, the caller waits in slices;
//! - for a blocking verb ([`blocking`], [`brief`]): it runs on the calling thread because a hand-over costs more than a small all_reduce,
//!   so no Python can run until it returns. A thread that listens to Python's wakeup descriptor (no GIL, no cost per verb but
//!   one uncontended lock) tells the group of a Ctrl-C that the verb did not survive by [`GRACE`]; the verb then ends, and the
//!   `KeyboardInterrupt` that is pending wins over its error.
//!
//! A brief verb keeps the GIL while it spins, some tens of microseconds at most, and releases it only to sleep: beside a busy Python
//! thread, taking it back costs up to 5 ms, and without one, releasing it and being ready for Ctrl-C cost as much as the rest of the call.

use std::cell::RefCell;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};
use bagua_core::group::Group;
use bagua_core::wait::with_blocking_hook;
use pyo3::prelude::*;

use crate::errors;

/// The longest a thread sleeps before it lets Python's signal handlers run.
const SLICE: Duration = Duration::from_millis(50);

/// How long a blocking verb may go on after Ctrl-C: one that is about to end by itself must not poison its group.
const GRACE: Duration = Duration::from_millis(200);

/// SIGINT on every Linux.
const CTRL_C: u8 = 2;

/// The main thread, what it is blocked in, and where signals are heard.
struct Ear {
    /// The thread on which Python runs signal handlers, and the process it belongs to; `None` before anybody listens.
    main: Option<(ThreadId, u32)>,
    /// The end that Python writes signal numbers to. Never closed: Python keeps its number.
    mouth: Option<UnixStream>,
    /// Counts blocking verbs of the main thread, to see whether one is still the same.
    turn: u64,
    /// Group of the verb that the main thread is in now.
    blocked: Option<Group>,
}

static EAR: Mutex<Ear> = Mutex::new(Ear { main: None, mouth: None, turn: 0, blocked: None });

fn ear() -> MutexGuard<'static, Ear> {
    EAR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts listening and returns the descriptor for `signal.set_wakeup_fd`. Call it on the main thread.
///
/// The first call starts a thread that never ends and never holds the GIL for longer than it takes to ask which handler
/// SIGINT has. Later calls return the same descriptor; in a forked child there is nothing to interrupt, and it raises.
#[pyfunction]
pub fn listen_for_interrupts(py: Python<'_>) -> PyResult<i32> {
    let start = || -> Result<i32> {
        let here = std::process::id();
        let mut ear = ear();
        if let (Some((_, home)), Some(mouth)) = (ear.main, &ear.mouth) {
            if home != here {
                return Err(Error::other("a forked child has no group to interrupt"));
            }
            return Ok(mouth.as_raw_fd());
        }
        let failed = |e: std::io::Error| Error::system("listening for interrupts", e);
        let (mouth, hearing) = UnixStream::pair().map_err(failed)?;
        mouth.set_nonblocking(true).map_err(failed)?;
        std::thread::Builder::new()
            .name("bagua-interrupts".to_owned())
            .spawn(move || listen(hearing))
            .map_err(failed)?;
        ear.main = Some((std::thread::current().id(), here));
        Ok(ear.mouth.insert(mouth).as_raw_fd())
    };
    start().map_err(|e| errors::raise(py, e))
}

fn listen(mut hearing: UnixStream) {
    let mut signal = [0u8];
    while matches!(hearing.read(&mut signal), Ok(1)) {
        if signal != [CTRL_C] {
            continue;
        }
        let turn = {
            let ear = ear();
            if ear.blocked.is_none() {
                continue;
            }
            ear.turn
        };
        std::thread::sleep(GRACE);
        let group = {
            let ear = ear();
            if ear.turn == turn { ear.blocked.clone() } else { None }
        };
        if let Some(group) = group
            && raises_keyboard_interrupt()
        {
            group.raise("KeyboardInterrupt", "interrupted by the user");
        }
    }
}

/// A program's own SIGINT handler may not want to end anything; it runs when the verb returns.
fn raises_keyboard_interrupt() -> bool {
    let asked = Python::try_attach(|py| -> PyResult<bool> {
        let signal = py.import("signal")?;
        let handler = signal.getattr("getsignal")?.call1((CTRL_C,))?;
        Ok(handler.is(signal.getattr("default_int_handler")?))
    });
    matches!(asked, Some(Ok(true)))
}

/// While it lives, Ctrl-C ends the group's waits, if this is the main thread.
struct Interruptible {
    armed: bool,
}

impl Interruptible {
    fn new(group: &Group) -> Interruptible {
        let mut ear = ear();
        let armed = ear.main.is_some_and(|(thread, _)| thread == std::thread::current().id());
        if armed {
            ear.turn += 1;
            ear.blocked = Some(group.clone());
        }
        Interruptible { armed }
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        if self.armed {
            // Taken out before the lock is released and dropped after: the last clone of a group leaves it.
            let group = ear().blocked.take();
            drop(group);
        }
    }
}

/// Runs a blocking operation of a group on this thread, without the GIL.
pub fn blocking<T: Send>(py: Python<'_>, group: &Group, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let outcome = without_gil(py, group, work);
    raised(py, outcome)
}

/// The first half of [`blocking`].
pub fn without_gil<T: Send>(py: Python<'_>, group: &Group, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let _interruptible = Interruptible::new(group);
    py.detach(work)
}

/// The outcome of a blocking operation as Python hears of it.
pub fn raised<T>(py: Python<'_>, outcome: Result<T>) -> PyResult<T> {
    outcome.map_err(|error| py.check_signals().err().unwrap_or_else(|| errors::raise(py, error)))
}

thread_local! {
    /// The group of the brief operation that this thread is in, and its readiness for Ctrl-C from its first sleep on.
    static BRIEF: RefCell<Option<(Group, Option<Interruptible>)>> = const { RefCell::new(None) };
}

/// As [`without_gil`], for an operation that is not expected to sleep: it releases the GIL only when it does.
pub fn brief<T>(group: &Group, work: impl FnOnce() -> Result<T>) -> Result<T> {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            drop(BRIEF.take());
        }
    }
    BRIEF.set(Some((group.clone(), None)));
    let _over = Over;
    with_blocking_hook(release_gil, work)
}

fn release_gil(wait: &mut (dyn FnMut() + Send)) {
    BRIEF.with_borrow_mut(|brief| {
        if let Some((group, interruptible)) = brief {
            interruptible.get_or_insert_with(|| Interruptible::new(group));
        }
    });
    Python::attach(|py| py.detach(wait));
}

/// Runs work on a thread of its own. An exception from a signal handler ends the wait, not the work, which ends by its deadline.
pub fn aside<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send + 'static) -> PyResult<T> {
    let (done, outcome) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("bagua-joining".to_owned())
        // Nobody waits any more after an interrupt; what was built is dropped on this thread then.
        .spawn(move || drop(done.send(work())))
        .map_err(|e| errors::raise(py, Error::system("starting a thread", e)))?;
    let outcome = Mutex::new(outcome);
    loop {
        let heard = py.detach(|| outcome.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SLICE));
        match heard {
            Ok(outcome) => return outcome.map_err(|e| errors::raise(py, e)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(errors::raise(py, Error::other("the joining thread panicked")));
            }
        }
    }
}

/// Waits in slices. `wait` waits at most so long; `pending` says that its `Timeout` only meant the slice.
pub fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    wait: impl Fn(Option<Duration>) -> Result<T> + Sync,
    pending: impl Fn() -> bool,
) -> PyResult<T> {
    let start = Instant::now();
    loop {
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        match py.detach(|| wait(Some(slice))) {
            Ok(outcome) => return Ok(outcome),
            Err(Error::Timeout { missing, noticed_by, progress, .. }) if pending() => {
                py.check_signals()?;
                if let Some(after) = timeout
                    && start.elapsed() >= after
                {
                    return Err(errors::raise(py, Error::Timeout { after, missing, noticed_by, progress }));
                }
            }
            Err(error) => return Err(errors::raise(py, error)),
        }
    }
}

/// Something of the core that is shut down without the GIL (its thread may be waiting for the GIL to run a callback), and not at
/// all in a forked child, whose threads and sockets are not its own.
pub struct Kept<T: Send> {
    inner: Option<T>,
    home: u32,
}

impl<T: Send> Kept<T> {
    pub fn new(inner: T) -> Kept<T> {
        Kept { inner: Some(inner), home: std::process::id() }
    }

    /// Hands it over; nothing is left to shut down.
    pub fn into_inner(mut self) -> T {
        self.inner.take().expect("only drop empties it")
    }
}

impl<T: Send> std::ops::Deref for Kept<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("only drop empties it")
    }
}

impl<T: Send> Drop for Kept<T> {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if std::process::id() != self.home {
            std::mem::forget(inner);
            return;
        }
        let mut left = Some(inner);
        // The interpreter is shutting down when it cannot be attached to; dropped where it is then.
        let _ = Python::try_attach(|py| {
            let inner = left.take();
            py.detach(move || drop(inner));
        });
    }
}
