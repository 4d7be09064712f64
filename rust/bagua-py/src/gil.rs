//! Releasing the GIL around blocking operations and drops of the core.
//!
//! A blocking verb runs on the calling thread, because handing it to another thread takes longer than a small
//! all_reduce. [`run_verb`] does one of two things:
//! - A verb that may take long releases the GIL until it is done.
//! - A verb on little memory keeps the GIL while it spins, for some tens of microseconds at most, and releases the GIL
//!   only to sleep. Taking the GIL back takes up to 5 ms if another Python thread is busy. If none is, releasing the
//!   GIL takes as long as the rest of the call.
//!
//! In both cases a verb that sleeps runs Python's signal handlers now and then: see [`crate::interrupt`].
//!
//! Rare operations that take longer than starting a thread run on another thread ([`run_released`]), while the caller
//! waits in slices.

use std::cell::RefCell;
use std::time::Instant;

use bagua_core::error::{Error, Result};
use bagua_core::group::Group;
use bagua_core::wait::{lengthened, with_blocking_hook};
use pyo3::prelude::*;

use crate::errors::Origin;
use crate::interrupt::{self, SLICE};

/// The reason why a blocking verb has no result.
pub enum Failure {
    /// A signal handler raised this while the verb waited.
    Raised(PyErr),
    Failed(Error),
}

impl Failure {
    /// Returns the exception for Python: that of a signal handler if one raises, otherwise the error of the verb.
    pub fn raise(self, py: Python<'_>, origin: &Origin) -> PyErr {
        match self {
            Failure::Raised(raised) => raised,
            Failure::Failed(error) => {
                interrupt::run_signal_handlers(py).err().unwrap_or_else(|| origin.raise(py, error))
            }
        }
    }
}

/// The blocking verb that a thread is in.
struct RunningVerb {
    group: Group,
    /// True if the verb keeps the GIL except while it sleeps.
    keeps_gil: bool,
    /// Times of the verb's first sleep and of its last run of the signal handlers. `None` before the first sleep.
    slept: Option<(Instant, Instant)>,
    /// The exception that a signal handler has raised.
    raised: Option<PyErr>,
}

impl RunningVerb {
    /// Returns the error for an operation of `group` that was called inside this verb.
    fn refusal(&self, group: &Group) -> Error {
        Error::other(format!(
            "a signal handler called an operation of the group '{}' while this thread was inside a blocking one of the group '{}': \
             let the handler raise an exception, which ends that, or set a flag and act on it afterwards",
            group.name(),
            self.group.name()
        ))
    }
}

thread_local! {
    /// The verb that this thread runs. Also set while the verb runs a signal handler.
    static RUNNING: RefCell<Option<RunningVerb>> = const { RefCell::new(None) };
}

/// Runs a blocking verb of a group on this thread. If `is_brief`, the verb keeps the GIL except while it sleeps.
///
/// If a signal handler raises an exception, the group fails on all ranks, which ends the verb.
pub fn run_verb<T: Send>(
    py: Python<'_>,
    group: &Group,
    is_brief: bool,
    work: impl FnOnce() -> Result<T> + Send,
) -> std::result::Result<T, Failure> {
    struct Clear;
    impl Drop for Clear {
        fn drop(&mut self) {
            drop(RUNNING.take());
        }
    }
    RUNNING.with_borrow_mut(|running| match running {
        Some(outer) => Err(Failure::Failed(outer.refusal(group))),
        None => {
            *running = Some(RunningVerb { group: group.clone(), keeps_gil: is_brief, slept: None, raised: None });
            Ok(())
        }
    })?;
    let after_a_panic = Clear;
    let run = || with_blocking_hook(sleep_in_slices, work);
    let result = if is_brief { run() } else { py.detach(run) };
    std::mem::forget(after_a_panic);
    match RUNNING.take().and_then(|verb| verb.raised) {
        Some(raised) => Err(Failure::Raised(raised)),
        None => result.map_err(Failure::Failed),
    }
}

/// Returns an error for an operation that a signal handler starts inside a blocking verb of this thread. The verb owns
/// the lane and waits for the handler to return, so the operation could never run.
pub fn refuse_inside_verb(group: &Group) -> Result<()> {
    RUNNING.with_borrow(|running| running.as_ref().map_or(Ok(()), |outer| Err(outer.refusal(group))))
}

/// The hook around each sleep of a verb. Sleeps without the GIL, and runs the signal handlers once in a slice.
fn sleep_in_slices(wait: &mut (dyn FnMut() + Send)) {
    let keeps_gil = RUNNING.with_borrow_mut(|verb| {
        verb.as_mut().is_some_and(|verb| {
            let now = Instant::now();
            verb.slept.get_or_insert((now, now));
            verb.keeps_gil
        })
    });
    if keeps_gil {
        Python::attach(|py| py.detach(wait));
    } else {
        wait();
    }
    let due = RUNNING.with_borrow(|verb| {
        let verb = verb.as_ref().filter(|verb| verb.raised.is_none())?;
        let (first, checked) = verb.slept?;
        (checked.elapsed() >= lengthened(SLICE, first.elapsed())).then(|| verb.group.clone())
    });
    let Some(group) = due else { return };
    // An interpreter that is shutting down runs no handlers.
    let ran = Python::try_attach(|py| {
        interrupt::run_signal_handlers(py).inspect_err(|raised| interrupt::fail_group(py, &group, raised))
    });
    RUNNING.with_borrow_mut(|verb| {
        if let Some(verb) = verb {
            verb.slept = verb.slept.map(|(first, _)| (first, Instant::now()));
            verb.raised = ran.and_then(PyResult::err);
        }
    });
}

/// Runs an operation of a group on another thread, while this thread waits without the GIL and runs Python's signal
/// handlers. If a handler raises an exception, the group fails on all ranks, which ends the operation.
pub fn run_released<T: Send + 'static>(
    py: Python<'_>,
    group: &Group,
    origin: &Origin,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    refuse_inside_verb(group).map_err(|e| origin.raise(py, e))?;
    let outcome = interrupt::on_thread(py, None, work);
    let result = outcome.inspect_err(|raised| interrupt::fail_group(py, group, raised))?;
    result.map_err(|e| origin.raise(py, e))
}

/// A value of the core that is dropped without the GIL, because its drop may wait for a thread that itself waits for
/// the GIL to run a Python callback. A forked child never drops it: its threads and sockets belong to the parent.
pub struct DropWithoutGil<T: Send> {
    /// The value. `None` only during drop and after `into_inner`.
    inner: Option<T>,
    /// Id of the process that built the value.
    owner: u32,
}

impl<T: Send> DropWithoutGil<T> {
    pub fn new(inner: T) -> DropWithoutGil<T> {
        DropWithoutGil { inner: Some(inner), owner: std::process::id() }
    }

    /// Returns the value. The caller then has to drop it without the GIL.
    pub fn into_inner(mut self) -> T {
        self.inner.take().expect("only drop and into_inner empty it")
    }
}

impl<T: Send> std::ops::Deref for DropWithoutGil<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("only drop and into_inner empty it")
    }
}

impl<T: Send> Drop for DropWithoutGil<T> {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if std::process::id() != self.owner {
            std::mem::forget(inner);
            return;
        }
        let mut undropped = Some(inner);
        // No thread can attach to an interpreter that is shutting down. The value is then dropped below, without GIL.
        let _ = Python::try_attach(|py| {
            let inner = undropped.take();
            py.detach(move || drop(inner));
        });
    }
}
