//! The communication thread, the queue of buckets, and handles.
//!
//! From below: a [`Handle`] is the outcome of a job; a [`Channel`] is a lane with a queue of jobs and a thread; a
//! [`Communicator`] is a group with one channel for its verbs; an [`Engine`] is a channel with a schedule of buckets.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **Program order.** What one thread submits and runs on a channel happens in that order.
//! 2. **No error is lost.** It reaches the handle; if nobody holds the handle, the channel's next call; if it concerns a bucket,
//!    the next `wait`. The group's first cause wins over its consequences.
//! 3. **No waiter is left behind.** A job ends by its result, its panic (a `System` error), or the end of the channel (`Aborted`).
//! 4. **Marking never waits for communication.** A bucket's memory travels to the thread by value, and its lock is held for
//!    moments only.
//! 5. **A forked child owns nothing here.** Its calls are errors, and its drops neither join nor close anything.

mod channel;
mod handle;
mod queue;
mod shared;

pub use channel::{Channel, Job};
pub use handle::Handle;
pub use queue::Engine;
pub use shared::SharedBucket;

use crate::error::Result;
use crate::group::{Group, Lane};

/// A group's main lane, shared by blocking calls (on the calling thread) and asynchronous ones (on a communication thread that
/// starts with the first of them), in program order.
pub struct Communicator {
    /// First field, so that the lane goes before the group does.
    channel: Channel,
    group: Group,
    /// As the lane told at the start, so that asking never waits for a running operation.
    transports: (&'static str, Vec<&'static str>),
}

impl Communicator {
    /// Opens the group's main lane. Collective.
    pub fn new(group: Group) -> Result<Communicator> {
        let lane = group.lane()?;
        let transports = (lane.collective(), lane.transports());
        let channel = Channel::over(lane, group.watch().clone(), group.name());
        Ok(Communicator { channel, group, transports })
    }

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Name of the collective and of the transport towards each rank.
    pub fn transports(&self) -> (&'static str, Vec<&'static str>) {
        self.transports.clone()
    }

    /// See [`Channel::run`].
    pub fn run<T>(&self, job: impl FnOnce(&mut Lane) -> Result<T>) -> Result<T> {
        self.channel.run(job)
    }

    /// See [`Channel::submit`].
    pub fn submit(&self, job: Job) -> Result<Handle> {
        self.channel.submit("an asynchronous operation", job)
    }

    /// See [`Channel::shutdown`].
    pub fn shutdown(&self) {
        self.channel.shutdown();
    }
}
