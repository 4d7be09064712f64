//! Views: the members of a group agree on a smaller group without the members that are gone.
//!
//! Each view has a number and is a group of its own, built by `bind` and `connect`. Nothing of a failed group is
//! repaired. Its members only use its control connections, which outlive the failure, to agree on the next view.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | the messages, and their encoding |
//! | `action` | the actions that an agreement asks its driver to perform, and its outcomes |
//! | `agreement` | the state machine: events in, actions out; no I/O, clock or socket |
//! | `inbox` | messages that arrived, even before this rank takes part |
//! | `shrink` | [`Group::shrink`](super::Group::shrink): runs the state machine on a control plane |
//!
//! The protocol for view v, among the ranks 0 to n - 1 of the group:
//!
//! 1. Each rank that takes part listens for the members of v, and sends `Ready` with v, the ranks that it knows to be
//!    gone, and where it listens, to the leader: the lowest rank that is not gone. The leader sends its own to all. A
//!    rank first waits a moment for further losses, because each loss makes all ranks send `Ready` again.
//! 2. When all ranks that are not gone are ready for v and agree on who is gone, the leader checks the quorum and sends
//!    `Propose`, with the ports of all members, whose hosts they know from this group.
//! 3. The members connect, open their lanes, and make a barrier in the new group.
//! 4. A rank that has passed the barrier, or learns that another has, publishes `Opened`, uses the view, and leaves the
//!    old group.
//!
//! All but `Opened` and `Refused` are messages to one rank, or from the leader to all: about 3 n in all. `Opened` is a
//! notice to all ranks (see [`plane`](super::plane)): every rank has it before it learns of the end of a rank that has
//! opened the view. A rank to which nothing has come for a second or two repeats messages that may have been lost with
//! a rank that passed them on.
//!
//! When a rank learns that another rank is gone, it gives v up and is ready for a later view. Invariants, quoted by the
//! tests:
//!
//! 1. **One proposal for a view.** While a rank is at view v, its set of gone ranks does not change. Only the lowest
//!    rank that is not gone may propose.
//! 2. **A view is used only when all its members have opened it**, because the barrier cannot be passed before.
//! 3. **A rank that is ready for a later view has not used an earlier one.** If a rank's barrier fails, the rank keeps
//!    its end of that view until it accepts a later proposal. By then every rank that is not gone has said that it did
//!    not pass the barrier. If a rank passed it, its `Opened` arrives instead, and this rank uses that view too,
//!    although it has already lost a member.
//! 4. **A rank that is left behind is notified** that it is lost, or by an `Opened` without it, before the connections
//!    to other ranks end. Connections that end after that do not mean that processes have ended.

mod action;
mod agreement;
mod carry;
mod inbox;
mod message;
mod shrink;
#[cfg(test)]
mod tests;

pub use agreement::Quorum;
pub use carry::carry_data;
pub(super) use inbox::Inbox;
#[cfg(test)]
pub(super) use message::GoneRank;
pub(super) use message::{Endpoint, RANKS_LIMIT, ViewMessage};
pub use shrink::View;
#[cfg(test)]
pub(super) use tests::replay::{ENDPOINT, replay};
