//! What an agreement asks its driver for, and how it ends.

#[cfg(doc)]
use super::agreement::Agreement;
use super::message::{Endpoint, ViewMessage};

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Action {
    /// Send a message to these ranks.
    Send(Vec<usize>, ViewMessage),
    /// Call [`Agreement::say`] after a while, in which more losses may become known.
    SayLater,
    /// Send a message to all ranks, before the end of this rank's connections is noticed anywhere.
    Publish(ViewMessage),
    /// Connect to the members of the view for which [`Agreement::say`] has listened last, open their lanes, make a barrier, and
    /// report [`Agreement::passed`] or [`Agreement::failed`].
    Build {
        /// Number of the view.
        view: u64,
        /// Where the members listen, in the order of their ranks.
        endpoints: Vec<Endpoint>,
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
