//! What an agreement asks its driver for, and how it ends.

#[cfg(doc)]
use super::agreement::Agreement;
use super::message::ViewMessage;

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Action {
    /// Send a message to these ranks.
    Send(Vec<usize>, ViewMessage),
    /// Call [`Agreement::say`] after a while, in which more losses may become known.
    SayLater,
    /// Send a message to all ranks, before the end of this rank's connections is noticed anywhere.
    Publish(ViewMessage),
    /// Bind for a view of these members and report [`Agreement::bound`].
    Bind(Vec<usize>),
    /// Drop what was bound.
    Discard,
    /// Connect to the members, open their lanes, make a barrier, and report [`Agreement::passed`] or [`Agreement::failed`].
    Build {
        /// The addresses of the members, in the order of their ranks.
        addresses: Vec<Vec<u8>>,
        /// The members.
        members: Vec<usize>,
    },
    /// End the build soon: because of this rank, or because the deadline has passed.
    Cancel(Option<usize>),
    /// Leave the built group, which this rank does not use, without being taken for one that has ended.
    Abandon,
    /// The agreement has ended.
    Finish(Outcome),
}

/// How an agreement ends on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Outcome {
    /// The built group is the view of this number with these members.
    Opened(u64, Vec<usize>),
    /// The others go on without this rank, as this one of them says.
    Excluded(usize),
    /// There is no view, for this reason.
    Refused(String),
    /// The deadline passed before these ranks had done their part.
    TimedOut(Vec<usize>),
}
