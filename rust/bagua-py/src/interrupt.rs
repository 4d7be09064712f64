//! Ctrl-C during waits.
//!
//! Python runs signal handlers on its main thread, between two bytecodes: never while that thread is inside the extension. So:
//! - a wait for a handle or an engine ([`wait_in_slices`]) returns to Python every [`SLICE`], when it is long less often, and runs the handlers;
//! - work that has no group yet ([`run_on_thread`]) runs on another thread, and the caller waits for it in slices;
//! - a blocking verb (an [`Interruptible`] on the calling thread) cannot return to Python before it ends. A thread reads Python's
//!   wakeup descriptor (`signal.set_wakeup_fd`; no GIL, no cost per verb but one uncontended lock) and poisons the verb's group
//!   when the verb has not ended [`GRACE`] after SIGINT. The verb then fails, and [`py_result`] raises the pending
//!   `KeyboardInterrupt` instead of its error.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use bagua_core::error::{Error, Result};
use bagua_core::group::{Awaited, Group, PerProcess};
use bagua_core::wait::{self, Waited, lengthened, lock};
use pyo3::prelude::*;

use crate::errors::{self, Origin};

/// How long a thread sleeps before it lets Python's signal handlers run; in a long wait up to four times as long, see [`lengthened`].
const SLICE: Duration = Duration::from_millis(50);

/// How long a blocking verb may go on after Ctrl-C: a verb that is about to end by itself must not poison its group.
const GRACE: Duration = Duration::from_millis(200);

/// SIGINT on every Linux.
const SIGINT: u8 = 2;

/// What the thread that reads the wakeup descriptor has to know.
#[derive(Default)]
struct InterruptState {
    /// The thread on which Python runs signal handlers; `None` before [`listen_for_interrupts`].
    main_thread: Option<ThreadId>,
    /// The end of the socket pair that Python writes signal numbers to. Never closed, because Python keeps its number.
    wakeup: Option<UnixStream>,
    /// Blocking verbs of the main thread so far: equal as long as it is still in the same one.
    verbs: u64,
    /// Group of the blocking verb that the main thread is in.
    group: Option<Group>,
}

/// A fork may come while the thread that reads has the lock, and there is no such thread in the child.
static STATE: PerProcess<Mutex<InterruptState>> = PerProcess::new();

fn state() -> MutexGuard<'static, InterruptState> {
    lock(STATE.get())
}

/// Starts listening and returns the descriptor for `signal.set_wakeup_fd`. Call it on the main thread.
///
/// The first call starts a thread that never ends and never holds the GIL for longer than it takes to ask which handler
/// SIGINT has. Later calls return the same descriptor; a forked child has a thread and a descriptor of its own.
#[pyfunction]
pub fn listen_for_interrupts(py: Python<'_>) -> PyResult<i32> {
    let start = || -> Result<i32> {
        let mut state = state();
        if let Some(wakeup) = &state.wakeup {
            return Ok(wakeup.as_raw_fd());
        }
        let failed = |e: std::io::Error| Error::system("listening for interrupts", e);
        let (wakeup, signals) = UnixStream::pair().map_err(failed)?;
        wakeup.set_nonblocking(true).map_err(failed)?;
        std::thread::Builder::new()
            .name("bagua-interrupts".to_owned())
            .spawn(move || read_signals(signals))
            .map_err(failed)?;
        state.main_thread = Some(std::thread::current().id());
        Ok(state.wakeup.insert(wakeup).as_raw_fd())
    };
    start().map_err(|e| errors::raise(py, e))
}

/// The thread that reads the wakeup descriptor.
fn read_signals(mut signals: UnixStream) {
    let mut signal = [0u8];
    while matches!(signals.read(&mut signal), Ok(1)) {
        if signal != [SIGINT] {
            continue;
        }
        let interrupted = {
            let state = state();
            if state.group.is_none() {
                continue;
            }
            state.verbs
        };
        std::thread::sleep(GRACE);
        let group = {
            let state = state();
            if state.verbs == interrupted { state.group.clone() } else { None }
        };
        if let Some(group) = group
            && sigint_raises_keyboard_interrupt()
        {
            group.raise("KeyboardInterrupt", "interrupted by the user");
        }
    }
}

/// False when the program has its own SIGINT handler, which may not want to end anything; that one runs when the verb returns.
fn sigint_raises_keyboard_interrupt() -> bool {
    let asked = Python::try_attach(|py| -> PyResult<bool> {
        let signal = py.import("signal")?;
        let handler = signal.getattr("getsignal")?.call1((SIGINT,))?;
        Ok(handler.is(signal.getattr("default_int_handler")?))
    });
    matches!(asked, Some(Ok(true)))
}

/// While it lives, Ctrl-C ends the waits of the group, if it was made on the main thread.
pub struct Interruptible {
    on_main_thread: bool,
}

impl Interruptible {
    pub fn new(group: &Group) -> Interruptible {
        let mut state = state();
        let on_main_thread = state.main_thread == Some(std::thread::current().id());
        if on_main_thread {
            state.verbs += 1;
            state.group = Some(group.clone());
        }
        Interruptible { on_main_thread }
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        if self.on_main_thread {
            // Taken under the lock and dropped after it: dropping the last clone of a group leaves the group.
            let group = state().group.take();
            drop(group);
        }
    }
}

/// The result of a blocking operation as Python gets it: an exception that is pending, as after Ctrl-C, comes before its error.
pub fn py_result<T>(py: Python<'_>, origin: &Origin, result: Result<T>) -> PyResult<T> {
    result.map_err(|error| py.check_signals().err().unwrap_or_else(|| origin.raise(py, error)))
}

/// Runs work on a thread of its own. An exception of a signal handler ends the wait, not the work, which ends by its deadline.
pub fn run_on_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    run_and_report(py, None, work)
}

/// As [`run_on_thread`]. Between two slices the caller calls the function of `waiting` with the ranks that the work waits for, if there are any.
pub fn run_and_report<T: Send + 'static>(
    py: Python<'_>,
    waiting: Option<(&Bound<'_, PyAny>, &Awaited)>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("bagua-joining".to_owned())
        // After an interrupt there is no receiver; what was built is then dropped on that thread.
        .spawn(move || drop(sender.send(work())))
        .map_err(|e| errors::raise(py, Error::system("starting a thread", e)))?;
    let (receiver, begun) = (Mutex::new(receiver), Instant::now());
    loop {
        let slice = lengthened(SLICE, begun.elapsed());
        let received = py.detach(|| lock(&receiver).recv_timeout(slice));
        match received {
            Ok(result) => return result.map_err(|e| errors::raise(py, e)),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals()?;
                if let Some((function, awaited)) = waiting
                    && let ranks = awaited.ranks()
                    && !ranks.is_empty()
                {
                    function.call1((ranks,))?;
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(errors::raise(py, Error::other("the joining thread panicked")));
            }
        }
    }
}

/// Waits for an operation of the core for at most `timeout` (`None`: until it is done), in slices without the GIL, and runs Python's signal
/// handlers between the slices: see [`bagua_core::wait::wait_in_slices`]. `origin` is the group that is waited for, if it is one.
pub fn wait_in_slices<T: Send>(
    py: Python<'_>,
    origin: Option<&Origin>,
    timeout: Option<Duration>,
    wait: impl FnMut(Duration) -> Waited<T> + Send,
    timed_out: impl FnOnce(Duration) -> Error + Send,
) -> PyResult<T> {
    // An interpreter that is shutting down runs no handlers.
    let check_signals = || Python::try_attach(|py| py.check_signals()).unwrap_or(Ok(()));
    let result = py.detach(|| wait::wait_in_slices(timeout, SLICE, wait, check_signals, timed_out))?;
    result.map_err(|error| match origin {
        Some(origin) => origin.raise(py, error),
        None => errors::raise(py, error),
    })
}
