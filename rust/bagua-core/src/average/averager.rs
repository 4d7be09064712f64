//! The interface between the averaging thread and other threads: abort, resume, synchronize, stop, statistics.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::averaging_group::Peers;
use super::averaging_thread::{Rounds, allocate_arena_buffers};
use super::join_running_job::Refused;
use super::shared_state::{Control, SharedControl};
use super::{AveragerState, AveragerStats, Elastic, Model, Settings};
use crate::error::{Error, Progress, Result};
use crate::group::{Group, JoinRequest, Lane, Options};
use crate::memory::ArenaBuffer;
use crate::types::ReduceOp;
use crate::wait::{Deadline, Waited, lock};

const PAUSE: Duration = Duration::from_millis(100);

/// How long `stop` waits for the thread after leaving the group.
const PATIENCE: Duration = Duration::from_secs(5);

/// The averaging of one model on one rank. Dropping it stops it.
pub struct Averager {
    shared: Arc<SharedControl>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Averager {
    /// Starts the averaging thread in its own group. The first round runs after one interval. `lane` must be a lane of
    /// `parent`. All ranks must pass weights of the same number, dtype and order. Collective.
    ///
    /// # Errors
    /// `UnsupportedType` for weights that are not real floating-point numbers; otherwise as [`Group::duplicate`].
    pub fn start(parent: &Group, lane: &mut Lane, model: Model, settings: Settings) -> Result<Averager> {
        check(&model, &settings)?;
        let built = parent.duplicate(lane, &settings.name).and_then(|group| {
            let peers = Peers::new(group, parent.ranks().to_vec())?;
            let arena_buffers = allocate_arena_buffers(&peers, &model.weights, &settings)?;
            Ok((peers, arena_buffers))
        });
        // A rank may leave the new group as soon as this returns, which must not disturb ranks that are still opening
        // it. The barrier comes even after an error, because the other ranks wait in it.
        let all_have = lane.barrier(&Options { label: "averager", ..Options::DEFAULT });
        let (peers, arena_buffers) = built?;
        all_have?;
        Averager::over(peers, arena_buffers, model, settings, false)
    }

    /// Joins the averaging of a running elastic job. Tries the servers that this rank's server knows, in turn until
    /// `deadline`. The weights and buffers are the job's only after [`Averager::wait_joined`].
    ///
    /// # Errors
    /// `Mismatch` for a model that does not fit; `Timeout`, with the last server's reason, after the deadline.
    pub fn join(model: Model, settings: Settings, deadline: &Deadline) -> Result<Averager> {
        check(&model, &settings)?;
        let Some(Elastic { server, digest }) = &settings.elastic else {
            return Err(Error::InvalidArgument("only a process of an elastic job can join later".to_owned()));
        };
        let mut why = "no join server of another rank is known".to_owned();
        loop {
            for (host, _) in server.servers().into_iter().filter(|(rank, _)| *rank != server.rank()) {
                let request = JoinRequest {
                    model: settings.name.clone(),
                    digest: *digest,
                    server: server.address(),
                    returns: false,
                };
                // A joining rank that loses the other ranks before its first round tries again.
                let entered = Peers::join(server, host, request).and_then(|peers| {
                    let arena_buffers = allocate_arena_buffers(&peers, &model.weights, &settings);
                    arena_buffers
                        .map(|arena_buffers| (peers, arena_buffers))
                        .map_err(|error| Refused::Now(error.to_string()))
                });
                match entered {
                    Ok((peers, arena_buffers)) => return Averager::over(peers, arena_buffers, model, settings, true),
                    Err(Refused::Now(text)) => why = text,
                    Err(Refused::ForEver(text)) => return Err(Error::Mismatch(text)),
                }
            }
            if deadline.passed() {
                let progress = Progress { what: format!("joining the averaging: {why}"), ..Progress::default() };
                let (after, noticed_by) = (deadline.limit(), server.rank());
                let progress = Some(Box::new(progress));
                return Err(Error::Timeout { after, missing: Vec::new(), noticed_by, progress });
            }
            std::thread::sleep(PAUSE.min(deadline.left()));
        }
    }

    fn over(
        peers: Peers,
        arena_buffers: Vec<ArenaBuffer>,
        model: Model,
        settings: Settings,
        is_new: bool,
    ) -> Result<Averager> {
        let takes_part = is_new || settings.takes_part;
        let shared = Arc::new(SharedControl::new(peers.world_ranks.clone(), peers.group.clone(), is_new, takes_part));
        let name = format!("bagua-average-{}", settings.name.replace('\0', ""));
        let rounds = Rounds::new(Arc::clone(&shared), peers, arena_buffers, model, settings);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || rounds.run())
            .map_err(|error| Error::system("cannot start an averaging thread", error))?;
        Ok(Averager { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Waits for at most `limit` until a joining rank has an average in which its own weights did not count.
    pub fn wait_joined(&self, limit: Duration) -> Waited<()> {
        self.wait(limit, |control| !control.is_new)
    }

    /// Returns the caller's count of forward passes, or the job's after this rank has joined.
    pub fn forwards(&self) -> u64 {
        self.shared.forwards.load(Relaxed)
    }

    /// Sets the caller's count of forward passes.
    pub fn set_forwards(&self, forwards: u64) {
        self.shared.forwards.store(forwards, Relaxed);
    }

    /// Returns the failure of the thread, if it failed.
    pub fn check(&self) -> Result<()> {
        self.shared.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// Makes this rank stop taking part. [`Averager::wait_aborted`] waits for a round in progress.
    pub fn abort(&self) {
        let mut control = self.shared.lock();
        control.takes_part = false;
        control.stats.state = AveragerState::Stopped;
        self.shared.notify();
    }

    /// Waits for at most `limit`, after [`Averager::abort`], until nothing writes to the weights any more. If the
    /// thread failed, returns its failure.
    pub fn wait_aborted(&self, limit: Duration) -> Waited<()> {
        self.wait(limit, |control| !control.in_round)
    }

    /// Makes this rank take part from the next round on. Has no effect if it already does.
    ///
    /// # Errors
    /// The failure of the thread.
    pub fn resume(&self) -> Result<()> {
        let mut control = self.shared.lock();
        if let Some(failure) = &control.failure {
            return Err(failure.clone());
        }
        if control.stopping {
            return Err(Error::Aborted("the averaging of this model has ended".to_owned()));
        }
        control.takes_part = true;
        control.stats.state = AveragerState::Running;
        Ok(())
    }

    /// Starts a round of all ranks that take part, which hold their locks throughout. Dropping the result gives up.
    ///
    /// # Errors
    /// The failure of the thread; `InvalidArgument` on a rank that does not take part.
    pub fn synchronize(&self) -> Result<Synchronization> {
        let mut control = self.shared.lock();
        if let Some(failure) = &control.failure {
            return Err(failure.clone());
        }
        if !control.takes_part || control.stopping {
            return Err(Error::InvalidArgument("this rank does not take part in the averaging".to_owned()));
        }
        if control.synchronizing.is_empty() {
            control.synchronized_too.clear();
        }
        control.synchronize_calls += 1;
        let call = control.synchronize_calls;
        control.synchronizing.insert(call);
        control.not_synchronizing.clear();
        drop(control);
        self.shared.notify();
        Ok(Synchronization { shared: Arc::clone(&self.shared), call })
    }

    /// Counts a step of the optimizer.
    pub fn count_step(&self) {
        self.shared.steps.fetch_add(1, Relaxed);
    }

    /// Returns the current statistics.
    pub fn stats(&self) -> AveragerStats {
        let steps = self.shared.steps.load(Relaxed);
        let unaveraged_steps = steps.saturating_sub(self.shared.averaged_steps.load(Relaxed));
        AveragerStats { unaveraged_steps, ..self.shared.lock().stats.clone() }
    }

    /// Ends the thread, and leaves the group. Waits for a round in progress for at most `limit`. May be called again.
    pub fn stop(&self, limit: Duration) {
        if !self.shared.owner.is_current() {
            // The thread belongs to the parent.
            std::mem::forget(lock(&self.thread).take());
            return;
        }
        self.abort();
        let _ = self.wait_aborted(limit);
        self.shared.stop();
        let Some(thread) = lock(&self.thread).take() else { return };
        let ended = self.wait(PATIENCE, |control| control.failure.is_some());
        if ended != Waited::Pending {
            // A panic of the thread cannot be reported here.
            let _ = thread.join();
        }
    }

    fn wait(&self, limit: Duration, done: impl Fn(&Control) -> bool) -> Waited<()> {
        self.shared.wait_until(limit, |control| {
            let failed = control.failure.clone().map(Err);
            failed.or_else(|| done(control).then_some(Ok(())))
        })
    }
}

impl Drop for Averager {
    fn drop(&mut self) {
        self.stop(PATIENCE);
    }
}

/// A waiting call of [`Averager::synchronize`].
pub struct Synchronization {
    shared: Arc<SharedControl>,
    call: u64,
}

impl Synchronization {
    /// Waits for at most `limit`.
    pub fn wait(&self, limit: Duration) -> Waited<()> {
        self.shared.wait_until(limit, |control| {
            let served = (control.synchronized >= self.call).then_some(Ok(()));
            served.or_else(|| control.failure.clone().map(Err))
        })
    }

    /// Returns the error for a deadline that passed. It names the ranks that take part but have not called.
    pub fn timed_out(&self, after: Duration, noticed_by: usize) -> Error {
        let missing = self.shared.lock().not_synchronizing.clone();
        let progress = Progress { what: "synchronize".to_owned(), ..Progress::default() };
        Error::Timeout { after, missing, noticed_by, progress: Some(Box::new(progress)) }
    }
}

impl Drop for Synchronization {
    fn drop(&mut self) {
        // A round that has started meanwhile continues, because the other ranks need this one.
        self.shared.lock().synchronizing.remove(&self.call);
    }
}

fn check(model: &Model, settings: &Settings) -> Result<()> {
    for part in &model.weights {
        ReduceOp::Avg.check(part.dtype())?;
        if part.dtype().is_complex() {
            return Err(Error::UnsupportedType(format!("{} weights cannot be averaged", part.dtype().name())));
        }
        if let Some(codec) = &settings.codec {
            codec.check(part.dtype())?;
        }
    }
    Ok(())
}
