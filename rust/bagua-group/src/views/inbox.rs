//! Messages about views that arrived and wait until this rank takes part in an agreement.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

use super::agreement::Agreement;
use super::message::ViewMessage;
use crate::wait::lock;

/// Maximum number of messages kept from one rank; the oldest are dropped first. An agreement needs fewer than ten.
const KEPT: usize = 512;

/// Messages and changes of peers that arrived on a control plane and wait for an agreement.
#[derive(Default)]
pub(in super::super) struct Inbox {
    state: Mutex<InboxState>,
    /// Notified when a message arrives or a peer's state changes.
    changed: Condvar,
}

/// The messages and the agreement of an [`Inbox`].
#[derive(Default)]
pub(super) struct InboxState {
    /// Messages and their senders, in the order of arrival.
    messages: VecDeque<(usize, ViewMessage)>,
    /// The agreement of this rank's earlier calls. `None` before the first call and during a call.
    pub(super) agreement: Option<Agreement>,
    /// True while a call is in progress.
    pub(super) busy: bool,
    /// Number of changes so far. A waiting call compares it, so that it misses no change.
    pub(super) changes: u64,
}

impl Inbox {
    pub(in super::super) fn put(&self, from: usize, message: ViewMessage) {
        let mut state = self.lock();
        if state.messages.iter().filter(|(sender, _)| *sender == from).count() >= KEPT
            && let Some(oldest) = state.messages.iter().position(|(sender, _)| *sender == from)
        {
            state.messages.remove(oldest);
        }
        state.messages.push_back((from, message));
        drop(state);
        self.notify();
    }

    /// Notifies the agreement that a peer's state or anything else has changed.
    pub(in super::super) fn notify(&self) {
        self.lock().changes += 1;
        self.changed.notify_all();
    }

    /// All messages, in the order of arrival.
    pub(super) fn take(&self) -> VecDeque<(usize, ViewMessage)> {
        std::mem::take(&mut self.lock().messages)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        lock(&self.state)
    }

    pub(super) fn changed(&self) -> &Condvar {
        &self.changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_messages_of_a_rank_are_dropped_when_there_are_too_many_and_those_of_others_stay() {
        let inbox = Inbox::default();
        inbox.put(1, ViewMessage::Withdrawn { missing: vec![] });
        for view in 0..KEPT as u64 + 5 {
            inbox.put(2, ViewMessage::Opened { view, gone: vec![] });
        }
        let kept = inbox.take();
        assert_eq!((kept.len(), &kept[0]), (KEPT + 1, &(1, ViewMessage::Withdrawn { missing: vec![] })));
        assert_eq!(kept[1], (2, ViewMessage::Opened { view: 5, gone: vec![] }));
        assert!(inbox.take().is_empty());
    }
}
