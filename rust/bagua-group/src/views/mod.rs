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
//! 1. Each rank that takes part listens for the members of v. It sends `Ready` to the leader, which is the lowest rank
//!    that is not gone. `Ready` has v, the ranks that the sender knows to be gone, and the sender's port. The leader
//!    sends its own `Ready` to all ranks. Before a rank says that it is ready, it waits a moment for further losses,
//!    because each loss makes all ranks say so again.
//! 2. When all ranks that are not gone are ready for v and agree on the ranks that are gone, the leader checks the
//!    quorum. It then sends `Propose` with the ports of all members, who know the rest of the addresses already.
//! 3. The members connect, open their lanes, and run a barrier in the new group. In a large group, each member first
//!    connects only to its neighbours in the ring and in the tree of the assembly.
//! 4. A rank that has passed the barrier, or learns that another rank has, publishes `Opened` and uses the view. A
//!    little later it leaves the old group and opens the remaining connections of the new one. Each of these two is as
//!    much work as a view and would delay the views of other ranks.
//!
//! `Opened` and `Refused` go to all ranks. All other messages go to one rank, or from the leader to all: about 3 n
//! messages in all, which travel along a tree. `Opened` is a notice, which each rank passes on once (see the control
//! plane), so a rank knows of it before it notices the end of any rank that has opened the view. If nothing arrives at
//! a rank for a second or two, it repeats its message, which may have been lost with a rank that passed it on.
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

#[cfg(test)]
pub(super) use action::{Action as ViewAction, Outcome};
pub use agreement::Quorum;
#[cfg(test)]
pub(super) use agreement::{Agreement, Gone};
pub use carry::carry_data;
pub(super) use inbox::Inbox;
#[cfg(test)]
pub(super) use message::GoneRank;
pub(super) use message::{Endpoint, RANKS_LIMIT, ViewMessage};
pub use shrink::View;
#[cfg(test)]
pub(super) use shrink::collecting;
#[cfg(test)]
pub(super) use tests::replay::{ENDPOINT, replay};
