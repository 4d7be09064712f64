//! The control thread: from its start to the goodbye.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use super::super::connection::ControlConn;
use super::accept::{self, Listeners};
use super::plane::{ALIVE, LINGER, Peer, Plane};
use super::session;
use crate::error::{Error, Result};
use crate::wait::lock;

/// The control thread, and the end of it.
pub(in super::super) struct Control {
    pub(in super::super) plane: Arc<Plane>,
    /// Starts tasks on the thread; `None` in a world of one.
    thread: Option<Thread>,
    /// Set by the first who ends it.
    ended: AtomicBool,
}

struct Thread {
    handle: tokio::runtime::Handle,
    stop: mpsc::UnboundedSender<()>,
    /// Disconnected when the thread is done.
    done: Mutex<std::sync::mpsc::Receiver<()>>,
    join: Mutex<Option<std::thread::JoinHandle<()>>>,
    id: std::thread::ThreadId,
}

impl Control {
    /// A plane without a thread, for a world of one.
    pub(in super::super) fn alone(plane: Plane) -> Control {
        Control { plane: Arc::new(plane), thread: None, ended: AtomicBool::new(false) }
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
                tokio::spawn(accept::accept(Arc::clone(&shared), listeners));
                stopped.recv().await;
                shared.goodbye().await;
            });
            // Closes every connection of the plane; a task never blocks, so this ends.
            drop(runtime);
            shared.room.clear(None);
            lock(&shared.building).conns.clear();
            drop(alive);
        };
        let join = std::thread::Builder::new()
            .name("bagua-control".to_owned())
            .spawn(body)
            .map_err(|e| Error::system("starting the control thread", e))?;
        let id = join.thread().id();
        let thread = Thread { handle, stop, done: Mutex::new(done), join: Mutex::new(Some(join)), id };
        Ok(Control { plane, thread: Some(thread), ended: AtomicBool::new(false) })
    }

    /// Runs a task on the thread.
    pub(in super::super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(thread) = &self.thread {
            drop(thread.handle.spawn(task));
        }
    }

    /// All connections are there: from here on peers are heard and watched.
    pub(in super::super) fn read_loop(&self, mut conns: HashMap<usize, ControlConn>) {
        let (plane, size) = (&self.plane, self.plane.config.world_size);
        let mut tasks = Vec::new();
        let peers = (0..size).map(|rank| {
            let conn = conns.remove(&rank)?;
            let (outbox, frames) = mpsc::unbounded_channel();
            tasks.push(session::read_loop(Arc::clone(plane), rank, conn, frames));
            let (heard, state, settled) = (Mutex::new(None), AtomicU8::new(ALIVE), AtomicBool::new(false));
            Some(Peer { outbox, heard, state, settled })
        });
        let peers: Vec<Option<Peer>> = peers.collect();
        let _ = plane.peers.set(peers);
        tasks.into_iter().for_each(|task| self.spawn(task));
        self.spawn(session::heartbeat(Arc::clone(plane)));
    }

    /// Says goodbye, closes everything and ends the thread. Idempotent; nothing in a forked child.
    pub(in super::super) fn leave(&self, reason: &str) {
        if !self.plane.owner.is_current() || self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.plane.give_up(reason);
        let Some(thread) = &self.thread else { return };
        let _ = thread.stop.send(());
        if std::thread::current().id() == thread.id {
            // The thread cannot wait for itself; it ends when it gets back to its loop.
            return;
        }
        // The thread's own end is bounded by LINGER. Ten times that, and it is not worth hanging for.
        let waited = lock(&thread.done).recv_timeout(LINGER * 10);
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
            // The thread is not in this process, and its descriptors are closed: dropping their owners would close others.
            std::mem::forget(self.thread.take());
            std::mem::forget(Arc::clone(&self.plane));
        }
    }
}
