//! The control thread: starting it, running tasks on it, leaving and ending it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;

use super::super::fork::OwnerProcess;
use super::super::serve::serve;
use super::accept::Listeners;
use super::plane::{LINGER, LONGEST_FAREWELL, Plane};
use crate::error::{Error, Result};
use crate::wait::lock;

/// Owner of the control thread; dropping it leaves the group and ends the thread.
pub(in super::super) struct Control {
    pub(in super::super) plane: Arc<Plane>,
    /// `None` in a world of one.
    thread: Option<Thread>,
    /// Set by the first call of `leave`.
    left: AtomicBool,
}

struct Thread {
    /// Starts tasks on the thread.
    handle: tokio::runtime::Handle,
    /// Ends the thread, which leaves after this time, or when it is sent again.
    stop: mpsc::UnboundedSender<Duration>,
    /// `None` from the first call of [`Control::begin_leave`] on.
    end: Mutex<Option<ThreadEnd>>,
    id: std::thread::ThreadId,
}

/// What it takes to wait for the thread's end.
struct ThreadEnd {
    /// As that of [`Thread`].
    stop: mpsc::UnboundedSender<Duration>,
    /// Disconnected when the thread has ended.
    done: Receiver<()>,
    join: std::thread::JoinHandle<()>,
}

/// A control thread that leaves its group. Dropping this waits for its end.
pub(in super::super) struct Leaving {
    /// `None` only while it is dropped.
    end: Option<ThreadEnd>,
    owner: OwnerProcess,
    /// It needs less, or is detached.
    limit: Duration,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Some(end) = self.end.take() else { return };
        if !self.owner.is_current() {
            // The thread is the parent's, and may have held a lock at the fork.
            std::mem::forget(end);
            return;
        }
        let ThreadEnd { stop, done, join } = end;
        let _ = stop.send(Duration::ZERO);
        if done.recv_timeout(self.limit) == Err(RecvTimeoutError::Disconnected) {
            let _ = join.join();
        }
    }
}

impl Control {
    /// A control plane without a thread, for a world of one.
    pub(in super::super) fn without_thread(plane: Plane) -> Control {
        Control { plane: Arc::new(plane), thread: None, left: AtomicBool::new(false) }
    }

    /// Starts the thread.
    pub(in super::super) fn start(plane: Plane, listeners: Listeners) -> Result<Control> {
        let plane = Arc::new(plane);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::system("starting the control thread", e))?;
        let handle = runtime.handle().clone();
        let (stop, mut stopped) = mpsc::unbounded_channel();
        let (alive, done) = std::sync::mpsc::channel::<()>();
        let shared = Arc::clone(&plane);
        let body = move || {
            runtime.block_on(async {
                let left = async {
                    let after = stopped.recv().await.unwrap_or_default();
                    let _ = tokio::time::timeout(after, stopped.recv()).await;
                    shared.announce_leave().await;
                };
                serve(&shared, listeners.sockets, &shared.admission, left).await;
            });
            // Closes every connection of the tasks; no task blocks, so this returns.
            drop(runtime);
            shared.pending.clear(None);
            drop(alive);
        };
        let join = std::thread::Builder::new()
            .name("bagua-control".to_owned())
            .spawn(body)
            .map_err(|e| Error::system("starting the control thread", e))?;
        let id = join.thread().id();
        let end = ThreadEnd { stop: stop.clone(), done, join };
        let thread = Thread { handle, stop, end: Mutex::new(Some(end)), id };
        Ok(Control { plane, thread: Some(thread), left: AtomicBool::new(false) })
    }

    /// Runs a task on the thread.
    pub(in super::super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(thread) = &self.thread {
            drop(thread.handle.spawn(task));
        }
    }

    /// Opens the skips of a view after this time, within a second.
    pub(in super::super) fn connect_skips(&self, after: Duration) {
        let plane = Arc::clone(&self.plane);
        self.spawn(async move {
            tokio::time::sleep(after).await;
            plane.connect_skips();
        });
    }

    /// Leaves the group, closes all connections and ends the thread. Idempotent; does nothing in a forked child.
    pub(in super::super) fn leave(&self, reason: &str) {
        drop(self.begin_leave(reason, Duration::ZERO));
    }

    /// As [`Control::leave`], but the thread leaves after this time, or when it is waited for, and ends while the caller goes on.
    pub(in super::super) fn begin_leave(&self, reason: &str, after: Duration) -> Option<Leaving> {
        let owner = self.plane.owner;
        if !owner.is_current() || self.left.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.plane.abort_waits(reason);
        let thread = self.thread.as_ref()?;
        let _ = thread.stop.send(after);
        let end = lock(&thread.end).take()?;
        if std::thread::current().id() == thread.id {
            // The thread cannot join itself; it ends when it returns to its event loop.
            return None;
        }
        // The thread ends soon after LINGER, when others have raised. After ten times that long, and what a long line takes, it is detached.
        let limit = self.plane.others_raise() + LINGER * 10 + LONGEST_FAREWELL;
        Some(Leaving { end: Some(end), owner, limit })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.leave("this rank left the group");
        if !self.plane.owner.is_current() {
            // The thread does not exist in this process and its descriptors are closed: dropping their owners would close other files.
            std::mem::forget(self.thread.take());
            std::mem::forget(Arc::clone(&self.plane));
        }
    }
}
