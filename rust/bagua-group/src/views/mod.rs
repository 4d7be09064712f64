//! Views: how the members of a group agree on a smaller group without those that are gone.
//!
//! A membership is a numbered view, and each view is a group of its own, built by `bind` and `connect`. Nothing of a failed group is
//! repaired: its members only use its control connections, which outlive the failure, to agree on the next view.
//!
//! | file | what it is |
//! |---|---|
//! | `message` | the messages, and their encoding |
//! | `addresses` | the addresses of the members, as they come |
//! | `agreement` | the state machine: events in, actions out; no I/O, clock or socket |
//! | `inbox` | messages that arrived, also before this rank takes part |
//! | `shrink` | [`Group::shrink`](super::Group::shrink): runs the state machine on a control plane |
//!
//! The protocol, for view v of the ranks 0 to n - 1 of the group:
//!
//! 1. Each rank that takes part sends `Ready` with v and the ranks that it knows to be gone, to the leader: the lowest rank that is not gone.
//!    The leader sends its own to all.
//! 2. When all ranks that are not gone are ready for v and agree on who is gone, the leader checks the quorum and sends `Propose`.
//! 3. The members bind and send their `Address` to the leader, which sends them all, in `Addresses`. They connect, open their lanes, and make
//!    a barrier in the new group.
//! 4. A rank that has passed the barrier, or learns that another has, publishes `Opened` and leaves the old group.
//!
//! All but `Opened` and `Refused` are messages to one rank, or of the leader to all: some 4 n in all, which travel along a tree. `Opened`
//! is a notice, which each rank passes on once (see the control plane): whoever learns of it has it before the end of any rank that
//! has opened the view.
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

mod addresses;
mod agreement;
mod carry;
mod inbox;
mod message;
mod shrink;
#[cfg(test)]
mod tests;

pub use agreement::Quorum;
pub(super) use agreement::{Action as ViewAction, Agreement, Gone, Outcome};
pub use carry::carry_data;
pub(super) use inbox::Inbox;
#[cfg(all(test, not(model)))]
pub(super) use message::GoneRank;
pub(super) use message::RANKS_LIMIT;
pub(super) use message::ViewMessage;
pub use shrink::View;
#[cfg(all(test, not(model)))]
pub(super) use tests::replay::replay;
