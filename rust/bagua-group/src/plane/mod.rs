//! The control plane: how the ranks of a group learn that one of them is lost, has failed or leaves.
//!
//! ```text
//!                 coordinator: the lowest rank            1,024 ranks on 64 hosts: two levels
//!                          0                                            0
//!                     / /  |  \                              /  /    |     \    \
//!        (deputy)    1 /   |   \                            1  2 ..  16     32  .. 1008     lowest rank of each host
//!                    : 2   3    4                                   /  \   /  \
//!                    ..:...:....:  idle links to the deputy        17..31 33..47            its host's other ranks
//! ```
//!
//! 1. **Links.** Every rank has one control link to its parent and one idle link to the rank that becomes its parent
//!    when that one is gone ([`tree`]). In a world of up to 128 ranks the parent of all is the coordinator, the lowest
//!    rank that is not gone, and the second lowest is the deputy. In a larger world a host's ranks have the lowest rank
//!    of their host as their parent, which passes everything on in both directions.
//! 2. **Notices.** What all ranks must be told goes up to the coordinator as `Tell`, and down from it as `Notices`,
//!    with a number. Every rank confirms the numbers that it and the ranks below it have (`Seen`). A link keeps the
//!    order, so no consequence overtakes its cause.
//! 3. **Loss.** Both ends of a link send heartbeats. A parent whose child's link ends, or is silent for the heartbeat
//!    timeout, tells all that the child is lost. So does the coordinator if a rank has not connected to its new parent
//!    in that time.
//! 4. **Succession.** A rank that loses its parent turns to the next one: it sends `Attach` with a digest of all
//!    notices that it has. If the two digests differ, both send each other all that they have. It also repeats what its
//!    old parent has not passed on. The deputy does not believe one rank's report that the coordinator is lost while
//!    its own link says otherwise: if the coordinator still sends heartbeats, the rank that cannot reach it is the lost
//!    one, unless more than half of the ranks cannot.
//! 5. **Leaving.** A rank sends `Left` and stays until the coordinator acknowledges that every other rank has that
//!    notice. Then it sends `Farewell` on each link and closes it, so that a peer for which the notice is still on its
//!    way does not take the rank for lost. Twice the heartbeat timeout is the only limit. The coordinator itself leaves
//!    when all others have its `Left` and no rank waits for an acknowledgement.
//! 6. **Cause.** A rank whose data connection to another broke asks the coordinator why ([`rank::Handle::ask`]). The
//!    coordinator sends that rank a `Ping` and waits for its `Pong`. Either it comes, after everything the rank had to
//!    say; or the rank is lost or leaves, and the notice comes before the answer. If both ranks live, the error names
//!    the connection between them. If such a connection keeps a view from being built, the higher of the two ranks
//!    gives way: it reports itself as lost.
//! 7. **Two halves.** If a network failure splits the ranks, each part counts the other ranks as lost. The quorum of
//!    the agreement on the next view lets at most one half continue; this module does not decide that. A rank that
//!    comes back after the others have excluded it is told so.
//!
//! | file | what it is |
//! |---|---|
//! | `rank` | one rank's part: the task that owns its links |
//! | `link` | a control link: the tasks that read and write a stream |
//! | `tree` | which ranks have links to which |
//! | `log` | the notices that a rank has, and which ranks are gone |
//! | `message` | the messages, and their encoding |
//!
//! The task needs a `tokio` runtime, streams that are `AsyncRead + AsyncWrite`, and no other clock than `tokio::time`.
//! So the tests run many ranks in one process on a paused clock: a killed rank is a dropped task, a frozen one a task
//! that is not polled.

mod link;
mod log;
mod message;
mod rank;
#[cfg(test)]
pub(super) mod tests;
mod tree;

pub(super) use log::Presence;
pub(super) use message::{Body, Notice};
#[cfg(test)]
pub(super) use message::{Message, NOTICES, Question, Routed};
pub(super) use rank::{Answer, Event, Handle, LEAVING, Network, Rank, Status, Unreachable, beat, no_heartbeat};
