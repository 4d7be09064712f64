//! Views: how the members of a group agree on a smaller group without those that are gone.
//!
//! A membership is a numbered view, and each view is a group of its own, built by `bind` and `connect`. Nothing of a failed group is
//! repaired: its members only use its control connections, which outlive the failure, to agree on the next view.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | the messages, and their encoding |
//! | `action` | what an agreement asks its driver for, and how it ends |
//! | `agreement` | the state machine: events in, actions out; no I/O, clock or socket |
//! | `inbox` | messages that arrived, also before this rank takes part |
//! | `shrink` | [`Group::shrink`](super::Group::shrink): runs the state machine on a control plane |
//!
//! The protocol, for view v of the ranks 0 to n - 1 of the group:
//!
//! 1. Each rank that takes part listens for the members of v, and sends `Ready` with v, the ranks that it knows to be gone, and where it
//!    listens, to the leader: the lowest rank that is not gone. The leader sends its own to all. A rank collects losses for a moment before:
//!    each of those that come together would make all ready anew.
//! 2. When all ranks that are not gone are ready for v and agree on who is gone, the leader checks the quorum and sends `Propose`, with where
//!    all of them listen: a port, because each knows the rest of the others' addresses from this group.
//! 3. The members connect, open their lanes, and make a barrier in the new group. In a large one each connects only to the ranks beside it
//!    and along the tree of the assembly before that.
//! 4. A rank that has passed the barrier, or learns that another has, publishes `Opened` and uses the view. It leaves the old group a little
//!    later, and then opens the skips of the overlay of the new one, as connections are that replace others: each of the two is as much work
//!    as a view, and would delay those of the others.
//!
//! All but `Opened` and `Refused` are messages to one rank, or of the leader to all: some 3 n in all, which travel along a tree. `Opened`
//! is a notice, which each rank passes on once (see the control plane): whoever learns of it has it before the end of any rank that
//! has opened the view. A rank to which nothing has come for a second or two says again what may have been lost with one that passed it on.
//!
//! Whenever a rank learns that another is gone, it gives v up and is ready for a later view. Invariants, quoted by the tests:
//!
//! 1. **One proposal for a view.** While a rank is at view v, its set of gone ranks does not change, and only the lowest of the others may
//!    propose.
//! 2. **A view is used only when all its members have opened it**, because only then the barrier can be passed.
//! 3. **A rank that is ready for a later view has not used an earlier one.** A rank whose barrier failed keeps its end of that view until
//!    it accepts a later proposal: by then every rank that is not gone has said that it did not pass. If one passed, its `Opened` has come
//!    instead, and this rank uses that view too, although it has lost a member already.
//! 4. **A rank that is left behind is notified**, by the notice that it is lost or by an `Opened` without it, before the others' connections
//!    end: ends of connections after that are no sign that processes ended.

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
