//! The notices that a rank has been told, in their order, and the ranks that are gone.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::super::views::ViewMessage;
use super::message::Notice;

/// State of a rank, as another rank knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Presence {
    /// The rank takes part.
    Present,
    /// The rank has left the group.
    Left,
    /// The rank has left the group, because it is in another view.
    Moved,
    /// The rank is lost, and its process is known to have ended.
    Ended,
    /// The rank is lost, but its process may live on: it is frozen, cut off, or sends messages that cannot be
    /// understood.
    Silent,
}

impl Presence {
    /// True if the rank is lost, and has not left.
    pub(in super::super) fn is_lost(self) -> bool {
        matches!(self, Presence::Ended | Presence::Silent)
    }
}

/// Distinguishes notices. Of notices with the same key only the first counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Gone(usize),
    Failed(u64),
    Unreached(usize),
    Opened(u64),
    Refused(u64),
}

impl From<&Notice> for Key {
    fn from(notice: &Notice) -> Key {
        match notice {
            Notice::Lost { rank, .. } | Notice::Left { rank, .. } => Key::Gone(*rank),
            Notice::Failed { group, .. } => Key::Failed(*group),
            Notice::Unreached { by, .. } => Key::Unreached(*by),
            Notice::View { message: ViewMessage::Opened { view, .. }, .. } => Key::Opened(*view),
            Notice::View { message: ViewMessage::Refused { view, .. }, .. } => Key::Refused(*view),
            // Correct ranks publish no other message about a view. A wrong one counts once for each rank.
            Notice::View { from, .. } => Key::Refused(u64::MAX - *from as u64),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Log {
    notices: Vec<Notice>,
    keys: HashSet<Key>,
    presence: Vec<Presence>,
    digest: u64,
}

impl Log {
    pub(super) fn new(size: usize) -> Log {
        Log { notices: Vec::new(), keys: HashSet::new(), presence: vec![Presence::Present; size], digest: 0 }
    }

    /// Adds a notice. Returns false if there is one with the same key already.
    pub(super) fn add(&mut self, notice: &Notice) -> bool {
        let key = Key::from(notice);
        if !self.keys.insert(key) {
            return false;
        }
        match notice {
            Notice::Lost { rank, ended, .. } => {
                self.presence[*rank] = if *ended { Presence::Ended } else { Presence::Silent };
            }
            Notice::Left { rank, moved } => {
                self.presence[*rank] = if *moved { Presence::Moved } else { Presence::Left };
            }
            Notice::Failed { .. } | Notice::Unreached { .. } | Notice::View { .. } => {}
        }
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        self.digest ^= hasher.finish();
        self.notices.push(notice.clone());
        true
    }

    pub(super) fn has(&self, key: Key) -> bool {
        self.keys.contains(&key)
    }

    pub(super) fn notices(&self) -> &[Notice] {
        &self.notices
    }

    pub(super) fn presence(&self) -> &[Presence] {
        &self.presence
    }

    pub(super) fn is_present(&self, rank: usize) -> bool {
        self.presence[rank] == Presence::Present
    }

    /// Equal on two ranks that have been told the same, in whatever order.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }
}
