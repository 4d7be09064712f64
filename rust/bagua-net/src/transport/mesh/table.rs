//! The streams of a mesh, and how two ranks close those between them while neither uses them.
//!
//! A run takes all streams and puts them back. Between runs another thread may ask a peer to close the streams between the two: it holds
//! them here, so that a run that begins meanwhile waits for the answer instead of using them, and sends a [`CloseRequest`] by other means.
//! The peer closes its ends and says so, or refuses, because it is in a run or messages are in flight; then the streams are used again.
//! Streams that were closed open again in the next run that needs them.
//!
//! Invariants, quoted by the tests:
//!
//! 1. **No byte is lost.** The asking rank neither sends nor receives from the request to the answer. The peer closes between two runs
//!    only, and only where it has received as many messages as were sent, and has sent as many as were received.
//! 2. **A request closes at its first arrival or never**, and the answer to a repeated one is the same. So the asking rank may repeat a
//!    request whose answer was lost, and use the streams after a refusal, whatever of its requests arrives later.
//! 3. **A stream is never used after the peer closed it.** The peer closes only in answer to a request, and until that answer the asking
//!    rank holds the streams.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::endpoint::Endpoint;
use super::run::PeerMessages;
use crate::wait::lock;

/// For how long a peer that refused is not asked again.
const REFUSED: Duration = Duration::from_millis(20);

/// What one rank asks another: to close the streams between them in one mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseRequest {
    /// Of all requests of this rank for streams of this mesh; the later one has the higher number.
    pub number: u64,
    /// Messages that the asking rank has sent to the peer in this mesh.
    pub sent: u64,
    /// Messages that it has received from the peer.
    pub received: u64,
}

/// Streams to a peer that this rank does not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleStreams {
    /// Index of the peer.
    pub peer: usize,
    /// Of all runs in this process, the number of the last one that used them.
    pub last_run: u64,
    /// How many there are.
    pub streams: usize,
}

/// What a run needs of each member, by index.
pub(super) struct Links {
    /// The streams to it.
    pub(super) endpoints: Vec<Endpoint>,
    /// The messages to and from it.
    pub(super) messages: Vec<PeerMessages>,
}

/// See the module.
pub struct StreamTable {
    state: Mutex<Streams>,
}

struct Streams {
    /// `None` in a run.
    at_rest: Option<Links>,
    /// Number of streams that may be closed in some state, those of a run included.
    open: usize,
    /// A run has failed: bytes may be in flight in the middle of a message.
    failed: bool,
    /// Number of requests of this rank.
    requests: u64,
    /// By peer: this rank's request that is not answered, whose streams are on hold, and how many these are.
    asked: BTreeMap<usize, (CloseRequest, usize)>,
    /// By peer: the number of its last request, and whether this rank closed the streams.
    answers: BTreeMap<usize, (u64, bool)>,
    /// By peer: when it last refused.
    refused: BTreeMap<usize, Instant>,
    /// By peer: whether it closed the streams, where the answer came in a run that has not settled it.
    outcomes: BTreeMap<usize, bool>,
}

impl StreamTable {
    /// A table between two runs.
    pub(super) fn new(links: Links) -> StreamTable {
        let open = links.endpoints.iter().filter(|endpoint| endpoint.may_close()).map(Endpoint::count).sum();
        StreamTable {
            state: Mutex::new(Streams {
                at_rest: Some(links),
                open,
                failed: false,
                requests: 0,
                asked: BTreeMap::new(),
                answers: BTreeMap::new(),
                refused: BTreeMap::new(),
                outcomes: BTreeMap::new(),
            }),
        }
    }

    /// Begins a run.
    ///
    /// # Panics
    /// When a run has not ended.
    pub(super) fn take(&self) -> Links {
        lock(&self.state).at_rest.take().expect("one run at a time")
    }

    /// Ends a run; whether it succeeded.
    pub(super) fn put(&self, mut links: Links, succeeded: bool) {
        let mut state = lock(&self.state);
        state.failed |= !succeeded;
        while let Some((peer, closed)) = state.outcomes.pop_first() {
            state.settle(&mut links.endpoints[peer], closed);
        }
        state.at_rest = Some(links);
    }

    /// Between two runs: what the endpoints say.
    pub(super) fn look<T>(&self, what: impl FnOnce(&[Endpoint]) -> T) -> T {
        what(lock(&self.state).at_rest.as_ref().map_or(&[], |links| &links.endpoints))
    }

    /// In a run: notes that so many streams have been opened.
    pub(super) fn note_opened(&self, streams: usize) {
        lock(&self.state).open += streams;
    }

    /// In a run: the answer of a peer that was asked to close the streams at this endpoint, which are used again or closed then. `None`
    /// before it has come.
    pub(super) fn settle(&self, peer: usize, endpoint: &mut Endpoint) -> Option<bool> {
        let mut state = lock(&self.state);
        let closed = state.outcomes.remove(&peer)?;
        state.settle(endpoint, closed);
        Some(closed)
    }

    /// The streams that the peers may be asked to close.
    pub fn idle(&self) -> Vec<IdleStreams> {
        let state = lock(&self.state);
        let Some(links) = state.at_rest.as_ref().filter(|_| !state.failed) else { return Vec::new() };
        let has_refused = |peer: &usize| state.refused.get(peer).is_some_and(|since| since.elapsed() < REFUSED);
        let idle = |(peer, endpoint): (usize, &Endpoint)| {
            (endpoint.may_close() && !has_refused(&peer)).then(|| IdleStreams {
                peer,
                last_run: endpoint.last_run(),
                streams: endpoint.count(),
            })
        };
        links.endpoints.iter().enumerate().filter_map(idle).collect()
    }

    /// Number of streams that are open, in a run or not, and may be idle some time; without those on hold.
    pub fn open(&self) -> usize {
        let state = lock(&self.state);
        if state.failed { 0 } else { state.open - state.on_hold() }
    }

    /// Puts the streams to a peer on hold. The request to send to it; `None` when they are in use.
    pub fn ask(&self, peer: usize) -> Option<CloseRequest> {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let links = state.at_rest.as_mut().filter(|_| !state.failed)?;
        let endpoint = links.endpoints.get_mut(peer).filter(|endpoint| endpoint.may_close())?;
        endpoint.hold();
        state.requests += 1;
        let (sent, received) = links.messages[peer].done();
        let request = CloseRequest { number: state.requests, sent, received };
        state.asked.insert(peer, (request, endpoint.count()));
        Some(request)
    }

    /// Closes all streams, where the group has failed and no run will use them again. How many there were; 0 in a run.
    pub fn abandon(&self) -> usize {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let Some(links) = state.at_rest.as_mut() else { return 0 };
        state.failed = true;
        state.asked.clear();
        let mut closed = 0;
        for endpoint in links.endpoints.iter_mut().filter(|endpoint| endpoint.is_wire()) {
            closed += endpoint.count();
            endpoint.shut();
        }
        closed
    }

    /// The requests of this rank that are not answered: the index of the peer, the request, and the number of streams on hold.
    pub fn unanswered(&self) -> Vec<(usize, CloseRequest, usize)> {
        lock(&self.state).asked.iter().map(|(peer, (request, streams))| (*peer, *request, *streams)).collect()
    }

    /// A request of a peer has come: whether this rank has closed the streams, to be sent as the answer. `None` for one that was sent before
    /// another that has come.
    pub fn requested(&self, peer: usize, request: CloseRequest) -> Option<bool> {
        let mut state = lock(&self.state);
        match state.answers.get(&peer) {
            Some((number, _)) if *number > request.number => None,
            Some((number, closed)) if *number == request.number => Some(*closed),
            _ => {
                let closed = state.close(peer, request);
                state.answers.insert(peer, (request.number, closed));
                Some(closed)
            }
        }
    }

    /// The answer of a peer to request `number` has come.
    pub fn answered(&self, peer: usize, number: u64, closed: bool) {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        if state.asked.get(&peer).is_none_or(|(request, _)| request.number != number) {
            return;
        }
        state.asked.remove(&peer);
        if !closed {
            state.refused.insert(peer, Instant::now());
        }
        match state.at_rest.take() {
            Some(mut links) => {
                state.settle(&mut links.endpoints[peer], closed);
                state.at_rest = Some(links);
            }
            None => drop(state.outcomes.insert(peer, closed)),
        }
    }
}

impl Streams {
    fn on_hold(&self) -> usize {
        self.asked.values().map(|(_, streams)| streams).sum()
    }

    /// Closes streams on hold, or lets them be used again.
    fn settle(&mut self, endpoint: &mut Endpoint, closed: bool) {
        if closed {
            self.open -= endpoint.count();
            endpoint.shut();
        } else {
            endpoint.resume();
        }
    }

    /// Closes the streams to a peer that asks for it, by invariant 1; also those that this rank has asked the peer to close.
    fn close(&mut self, peer: usize, CloseRequest { sent, received, .. }: CloseRequest) -> bool {
        let Some(mut links) = self.at_rest.take() else { return false };
        let endpoint = &mut links.endpoints[peer];
        let are_idle = endpoint.is_held() || endpoint.may_close() || !endpoint.is_open();
        let closes = !self.failed && are_idle && links.messages[peer].done() == (received, sent);
        if closes {
            self.asked.remove(&peer);
            self.settle(endpoint, true);
        }
        self.at_rest = Some(links);
        closes
    }
}

#[cfg(test)]
mod tests;
