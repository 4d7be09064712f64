//! The actions that an agreement asks its driver to perform, and its possible outcomes.

use super::message::{Endpoint, ViewMessage};

/// An action that the driver must perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Action {
    /// Send a message to these ranks.
    Send(Vec<usize>, ViewMessage),
    /// Wait for a moment, during which more losses may become known, and then call `Agreement::say`.
    SayLater,
    /// Send a message to all ranks. It must arrive before any rank notices that this rank's connections have ended.
    Publish(ViewMessage),
    /// Connect to the members of the view for which the last `Agreement::say` opened listeners, open lanes to them,
    /// run a barrier, and then call `Agreement::passed` or `Agreement::failed`.
    Build {
        /// Number of the view.
        view: u64,
        /// Listening endpoints of the members, in the order of their ranks.
        endpoints: Vec<Endpoint>,
        members: Vec<usize>,
    },
    /// Cancel the build. `Some` is the rank that made this necessary; `None` means that the deadline has passed.
    Cancel(Option<usize>),
    /// Leave the built group, which this rank does not use. Its members must not conclude that this process has ended.
    Abandon,
    Finish(Outcome),
}

/// How an agreement ends on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Outcome {
    /// The built group is the view with this number and these members.
    Opened(u64, Vec<usize>),
    /// The other ranks continue without this rank. The number is the rank that said so.
    Excluded(usize),
    /// The ranks could not agree on a view, for this reason.
    Refused(String),
    /// The deadline passed before these ranks had done their part.
    TimedOut(Vec<usize>),
}
