//! The control thread: starting it, running tasks on it, leaving and ending it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::super::serve::serve;
use super::accept::Listeners;
use super::plane::{LINGER, Plane};
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
    /// Ends the thread.
    stop: mpsc::UnboundedSender<()>,
    /// Disconnected when the thread has ended.
    done: Mutex<std::sync::mpsc::Receiver<()>>,
    join: Mutex<Option<std::thread::JoinHandle<()>>>,
    id: std::thread::ThreadId,
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
                    stopped.recv().await;
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
        let thread = Thread { handle, stop, done: Mutex::new(done), join: Mutex::new(Some(join)), id };
        Ok(Control { plane, thread: Some(thread), left: AtomicBool::new(false) })
    }

    /// Runs a task on the thread.
    pub(in super::super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(thread) = &self.thread {
            drop(thread.handle.spawn(task));
        }
    }

    /// Leaves the group, closes all connections and ends the thread. Idempotent; does nothing in a forked child.
    pub(in super::super) fn leave(&self, reason: &str) {
        if !self.plane.owner.is_current() || self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        self.plane.abort_waits(reason);
        let Some(thread) = &self.thread else { return };
        let _ = thread.stop.send(());
        if std::thread::current().id() == thread.id {
            // The thread cannot join itself; it ends when it returns to its event loop.
            return;
        }
        // The thread ends within LINGER, when others have raised. After ten times that long, it is detached.
        let waited = lock(&thread.done).recv_timeout(self.plane.others_raise() + LINGER * 10);
        if waited == Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
            && let Some(join) = lock(&thread.join).take()
        {
            let _ = join.join();
        }
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
