//! Matches messages with posted receives: by sender and tag, in order of posting and of arrival.

use std::collections::VecDeque;

/// A receive that no message has matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Posted {
    pub(super) receive: u64,
    /// Group rank of the sender. `None` for any.
    pub(super) from: Option<usize>,
    pub(super) tag: u32,
}

impl Posted {
    fn takes(&self, from: usize, tag: u32) -> bool {
        self.tag == tag && self.from.is_none_or(|wanted| wanted == from)
    }
}

/// A message that no receive has matched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arrived<M> {
    pub(super) from: usize,
    pub(super) tag: u32,
    pub(super) message: M,
}

/// Posted receives that no message has matched yet, and messages that arrived before their receive. A matching pair is
/// never in both lists.
#[derive(Debug)]
pub(super) struct Matching<M> {
    posted: VecDeque<Posted>,
    arrived: VecDeque<Arrived<M>>,
}

impl<M> Default for Matching<M> {
    fn default() -> Matching<M> {
        Matching { posted: VecDeque::new(), arrived: VecDeque::new() }
    }
}

impl<M> Matching<M> {
    /// Returns the first message that matches the receive. If there is none, keeps the receive.
    pub(super) fn post(&mut self, posted: Posted) -> Option<Arrived<M>> {
        match self.arrived.iter().position(|message| posted.takes(message.from, message.tag)) {
            Some(at) => self.arrived.remove(at),
            None => {
                self.posted.push_back(posted);
                None
            }
        }
    }

    /// Removes the first receive that matches a message, and returns its number.
    pub(super) fn take(&mut self, from: usize, tag: u32) -> Option<u64> {
        let at = self.posted.iter().position(|posted| posted.takes(from, tag))?;
        self.posted.remove(at).map(|posted| posted.receive)
    }

    /// Keeps a message for which [`Matching::take`] found no receive.
    pub(super) fn keep(&mut self, arrived: Arrived<M>) {
        self.arrived.push_back(arrived);
    }

    pub(super) fn clear(&mut self) {
        self.posted.clear();
        self.arrived.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_receives_match_by_sender_and_tag_in_order() {
        let mut matching = Matching::default();
        let posted = |receive, from, tag| Posted { receive, from, tag };
        assert_eq!(matching.post(posted(1, Some(2), 5)), None);
        assert_eq!(matching.post(posted(2, Some(2), 6)), None);
        assert_eq!(matching.post(posted(3, Some(2), 5)), None);
        assert_eq!(matching.take(1, 5), None, "of another sender");
        assert_eq!(matching.take(2, 5), Some(1), "the first that was posted");
        assert_eq!(matching.take(2, 5), Some(3));
        assert_eq!(matching.take(2, 5), None);
        for message in ["a", "b", "c"] {
            matching.keep(Arrived { from: 0, tag: 7, message });
        }
        assert_eq!(matching.post(posted(4, Some(0), 7)).map(|arrived| arrived.message), Some("a"));
        assert_eq!(matching.post(posted(5, Some(0), 8)), None);
        assert_eq!(matching.post(posted(6, Some(0), 7)).map(|arrived| arrived.message), Some("b"));
    }

    #[test]
    fn a_receive_from_any_rank_takes_the_message_that_arrived_first() {
        let mut matching = Matching::default();
        matching.keep(Arrived { from: 3, tag: 0, message: () });
        matching.keep(Arrived { from: 1, tag: 0, message: () });
        let any = |receive| Posted { receive, from: None, tag: 0 };
        assert_eq!(matching.post(any(1)).map(|arrived| arrived.from), Some(3));
        assert_eq!(matching.post(any(2)).map(|arrived| arrived.from), Some(1));
        assert_eq!(matching.post(any(3)), None);
        assert_eq!(matching.post(Posted { receive: 4, from: Some(2), tag: 0 }), None);
        assert_eq!(matching.take(2, 0), Some(3), "it was posted before the one that names the sender");
        assert_eq!(matching.take(2, 0), Some(4));
    }
}
