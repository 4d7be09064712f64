//! The communication thread, the queue of buckets, and handles.

use std::sync::Arc;
use std::time::Duration;

use crate::bucket::Bucket;
use crate::error::Result;
use crate::group::{Group, Lane};
use crate::memory::Region;

/// A job for a communication thread.
pub type Job = Box<dyn FnOnce(&mut Lane) -> Result<()> + Send + 'static>;

/// The outcome of a job, now or later. Cheap to clone.
#[derive(Clone)]
pub struct Handle {}

#[expect(unused_variables, reason = "signatures first")]
impl Handle {
    /// Waits until the job is done, at most `timeout` (`None`: until its own deadline ends it). `Timeout` leaves the job running.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> { unimplemented!() }
    /// True when it is done, well or not.
    pub fn is_completed(&self) -> bool { unimplemented!() }
}

/// A group's main lane, shared by blocking calls (on the calling thread) and asynchronous ones (on a communication thread that
/// starts with the first of them), in program order.
pub struct Communicator {}

#[expect(unused_variables, reason = "signatures first")]
impl Communicator {
    /// Opens the group's main lane. Collective.
    pub fn new(group: Group) -> Result<Communicator> { unimplemented!() }
    /// The group.
    pub fn group(&self) -> &Group { unimplemented!() }
    /// Name of the collective and of the transport towards each rank.
    pub fn transports(&self) -> (&'static str, Vec<&'static str>) { unimplemented!() }
    /// Runs a job on this thread, after everything that was submitted before.
    pub fn run<T>(&self, job: impl FnOnce(&mut Lane) -> Result<T>) -> Result<T> { unimplemented!() }
    /// Hands a job to the communication thread.
    pub fn submit(&self, job: Job) -> Result<Handle> { unimplemented!() }
}

/// One strictly ordered queue of buckets with a lane and a communication thread of its own.
pub struct Engine {}

#[expect(unused_variables, reason = "signatures first")]
impl Engine {
    /// Opens a lane and starts the thread. Collective.
    pub fn new(group: &Group, name: &str) -> Result<Engine> { unimplemented!() }
    /// Waits for what is pending, then replaces the buckets. The order is the order of communication and must be equal on all ranks.
    /// Refuses a tensor name, or the memory of a non-empty tensor, that appears twice, naming both places.
    pub fn register(&self, buckets: Vec<Arc<Bucket>>) -> Result<()> { unimplemented!() }
    /// A tensor's values are final for this step. `region` replaces its memory (same count and dtype) when it moved.
    /// An unknown name, or a tensor marked twice before its bucket was communicated, is an error.
    pub fn mark_ready(&self, tensor: &str, region: Option<Region>) -> Result<()> { unimplemented!() }
    /// Waits until every scheduled bucket is done, and returns how many were. A bucket that is partly ready is an error that names the
    /// tensors that are missing, and starts afresh.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<usize> { unimplemented!() }
    /// Names of the tensors that are not ready yet, of buckets that were not communicated since the last `wait`.
    pub fn unready(&self) -> Vec<String> { unimplemented!() }
    /// Runs a job on the communication thread, in order with the buckets.
    pub fn submit(&self, job: Job) -> Result<Handle> { unimplemented!() }
    /// Ends the thread: what is queued fails with `Aborted`, what is running ends soon. Idempotent; drop does the same.
    pub fn shutdown(&self) { unimplemented!() }
}
