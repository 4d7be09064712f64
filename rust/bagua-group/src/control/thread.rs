//! The control thread: starting it, running tasks on it, leaving and ending it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::super::address::Address;
use super::super::connection::ControlConn;
use super::super::fork::OwnerProcess;
use super::super::plane::{Handle, LEAVING, Rank, beat};
use super::super::serve::serve;
use super::accept::Listeners;
use super::shared::Plane;
use super::world::World;
use crate::error::{Error, Result};
use crate::wait::lock;

/// Owner of the control thread; dropping it leaves the group and ends the thread.
pub(in super::super) struct Control {
    pub(in super::super) plane: Arc<Plane>,
    /// `None` in a world of one rank.
    thread: Option<Thread>,
    /// Set by the first call of `leave`.
    left: AtomicBool,
}

struct Thread {
    /// Starts tasks on the thread.
    handle: tokio::runtime::Handle,
    /// Leaves the group and ends the thread.
    stop: mpsc::UnboundedSender<()>,
    /// Returns when this rank has left. `None` before the world is known.
    rank: Arc<Mutex<Option<JoinHandle<bool>>>>,
    /// `None` from the first call of [`Control::begin_leave`] on.
    end: Mutex<Option<ThreadEnd>>,
    id: std::thread::ThreadId,
}

/// Waits for the thread's end.
struct ThreadEnd {
    /// Disconnected when the thread has ended.
    done: Receiver<()>,
    join: std::thread::JoinHandle<()>,
}

/// A control thread that leaves its group. Dropping this waits for its end.
pub(in super::super) struct Leaving {
    /// `None` only while it is dropped.
    end: Option<ThreadEnd>,
    owner: OwnerProcess,
    /// The thread is detached after this time.
    limit: Duration,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Some(end) = self.end.take() else { return };
        if !self.owner.is_current() {
            // In a forked child: the thread exists only in the parent, and may have held a lock at the fork.
            std::mem::forget(end);
            return;
        }
        let ThreadEnd { done, join } = end;
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
        let rank: Arc<Mutex<Option<JoinHandle<bool>>>> = Arc::default();
        let (shared, task) = (Arc::clone(&plane), Arc::clone(&rank));
        let body = move || {
            runtime.block_on(async {
                let left = async {
                    let _ = stopped.recv().await;
                    let running = lock(&task).take();
                    if let (Some(handle), Some(running)) = (shared.handle.get(), running) {
                        handle.leave(shared.moved.load(Ordering::Acquire));
                        let _ = running.await;
                    }
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
        let end = ThreadEnd { done, join };
        let thread = Thread { handle, stop, rank, end: Mutex::new(Some(end)), id };
        Ok(Control { plane, thread: Some(thread), left: AtomicBool::new(false) })
    }

    /// Runs a task on the thread.
    pub(in super::super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(thread) = &self.thread {
            drop(thread.handle.spawn(task));
        }
    }

    /// Sets the world, connects to the other ranks, and answers their handshakes. Returns at once.
    pub(in super::super) fn enter(&self, world: World) {
        let plane = &self.plane;
        let world = plane.world.get_or_init(|| world);
        if let Some(thread) = &self.thread {
            let mut numbers = HashMap::new();
            let number = |address: &Address| {
                let next = numbers.len();
                *numbers.entry(address.host_id.clone()).or_insert(next)
            };
            let hosts = world.addresses.iter().map(number).collect();
            let (config, events) = (&plane.config, Arc::clone(plane));
            let on_event = move |event| events.handle_event(event);
            let (rank, handle): (Rank<Plane>, Handle<ControlConn>) =
                Rank::new(config.rank, hosts, config.heartbeat_timeout, Arc::clone(plane), on_event);
            plane.handle.get_or_init(|| handle);
            *lock(&thread.rank) = Some(thread.handle.spawn(rank.run()));
            self.spawn(watch_lines(Arc::clone(plane)));
        }
        plane.world_known.send_replace(true);
    }

    /// Leaves the group, closes all connections and ends the thread. Idempotent; does nothing in a forked child.
    pub(in super::super) fn leave(&self, reason: &str) {
        drop(self.begin_leave(reason));
    }

    /// Leaves like [`Control::leave`], but does not wait for the end of the thread.
    pub(in super::super) fn begin_leave(&self, reason: &str) -> Option<Leaving> {
        let owner = self.plane.owner;
        if !owner.is_current() || self.left.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.plane.abort_waits(reason);
        let thread = self.thread.as_ref()?;
        let _ = thread.stop.send(());
        let end = lock(&thread.end).take()?;
        if std::thread::current().id() == thread.id {
            // The thread cannot join itself; it ends when it returns to its event loop.
            return None;
        }
        // The control plane's task ends within LEAVING timeouts. The thread may also wait for a processor.
        let limit = self.plane.config.heartbeat_timeout * (LEAVING + 1);
        Some(Leaving { end: Some(end), owner, limit })
    }
}

/// Looks for broken lines, until this rank leaves.
async fn watch_lines(plane: Arc<Plane>) {
    let timeout = plane.config.heartbeat_timeout;
    let period = beat(timeout);
    let mut looked = Instant::now();
    while !plane.has_left() {
        tokio::time::sleep(period).await;
        let now = Instant::now();
        let late = now.saturating_duration_since(looked).saturating_sub(period);
        looked = now;
        plane.streams.end_broken(timeout, late, now);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.leave("this rank left the group");
        if !self.plane.owner.is_current() {
            // The thread does not exist in this process and its descriptors are closed: dropping their owners would
            // close other files.
            std::mem::forget(self.thread.take());
            std::mem::forget(Arc::clone(&self.plane));
        }
    }
}
