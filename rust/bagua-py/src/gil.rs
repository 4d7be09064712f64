//! Releasing the GIL around blocking operations and drops of the core.
//!
//! A blocking verb runs on the calling thread, because a hand-over to another thread costs more than a small all_reduce:
//! - [`release`]: the GIL is released for the whole verb.
//! - [`release_when_blocked`]: a verb on little memory keeps the GIL while it spins, some tens of microseconds at most, and releases
//!   it only to sleep. Beside a busy Python thread, taking the GIL back costs up to 5 ms; without one, releasing it and being ready
//!   for Ctrl-C cost as much as the rest of the call.
//!
//! In both, Ctrl-C ends the verb: see [`crate::interrupt`].

use std::cell::RefCell;

use bagua_core::error::Result;
use bagua_core::group::Group;
use bagua_core::wait::with_blocking_hook;
use pyo3::prelude::*;

use crate::errors::Origin;
use crate::interrupt::{self, Interruptible};

/// Runs a blocking operation of a group on this thread, without the GIL.
pub fn release<T: Send>(py: Python<'_>, group: &Group, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let _interruptible = Interruptible::new(group);
    py.detach(work)
}

/// As [`release`], with the result as Python gets it.
pub fn run_released<T: Send>(
    py: Python<'_>,
    group: &Group,
    origin: &Origin,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let result = release(py, group, work);
    interrupt::py_result(py, origin, result)
}

thread_local! {
    /// The group of the operation that runs in [`release_when_blocked`] on this thread, and from its first sleep on the guard that
    /// lets Ctrl-C end it.
    static SHORT_OPERATION: RefCell<Option<(Group, Option<Interruptible>)>> = const { RefCell::new(None) };
}

/// As [`release`], for an operation that is not expected to sleep: it keeps the GIL until its first sleep.
pub fn release_when_blocked<T>(group: &Group, work: impl FnOnce() -> Result<T>) -> Result<T> {
    struct Clear;
    impl Drop for Clear {
        fn drop(&mut self) {
            drop(SHORT_OPERATION.take());
        }
    }
    SHORT_OPERATION.set(Some((group.clone(), None)));
    let _clear = Clear;
    with_blocking_hook(release_around, work)
}

/// The hook of [`release_when_blocked`]: runs the wait without the GIL.
fn release_around(wait: &mut (dyn FnMut() + Send)) {
    SHORT_OPERATION.with_borrow_mut(|operation| {
        if let Some((group, interruptible)) = operation {
            interruptible.get_or_insert_with(|| Interruptible::new(group));
        }
    });
    Python::attach(|py| py.detach(wait));
}

/// A value of the core whose drop may wait for a thread that itself waits for the GIL, to run a Python callback: it is dropped
/// without the GIL. In a forked child, whose threads and sockets belong to the parent, it is never dropped.
pub struct DropWithoutGil<T: Send> {
    /// `None` only during drop and after `into_inner`.
    inner: Option<T>,
    /// The process that built it.
    owner: u32,
}

impl<T: Send> DropWithoutGil<T> {
    pub fn new(inner: T) -> DropWithoutGil<T> {
        DropWithoutGil { inner: Some(inner), owner: std::process::id() }
    }

    /// The value itself; its drop is then up to the caller.
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
        // While the interpreter shuts down, nothing can be attached to it; the value is then dropped below, without the GIL.
        let _ = Python::try_attach(|py| {
            let inner = undropped.take();
            py.detach(move || drop(inner));
        });
    }
}
