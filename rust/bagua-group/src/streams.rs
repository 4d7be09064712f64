//! The streams of a lane, which open on demand, and the wrapper of every data stream.
//!
//! Two ranks have a few streams in a lane: the smaller of the numbers in their addresses. The first stream opens in the
//! first operation that has a message between the two ranks. The other streams open in the first operation that divides
//! a message between streams. The rank with the higher world rank dials, and the other rank accepts. The control thread
//! of the accepting rank keeps the connection until its lane asks for it, so that a dial never waits for the other
//! rank's operation.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::connection::{ConnKey, DataConn};
use super::control::{Control, Dial, Plane};
use super::descriptors;
use super::fork::ForkFd;
use super::handshake::{Failed, Purpose};
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::stats::Stats;
use crate::transport::{Batch, Broken, OpContext, OpenStreams, Opened, Readiness, Tls, Transport};

/// Bit position of a stream's number in its `index`.
const NUMBER_SHIFT: u32 = 8;

/// A stream of a lane or of messages. Closed in forked children. Its bytes are counted.
pub struct DataStream {
    /// Registrations of all descriptors of the stream. They end before the descriptors are closed.
    _fork_fds: Vec<ForkFd>,
    stream: Box<dyn Transport>,
    /// The group's counters.
    stats: Arc<Stats>,
}

impl DataStream {
    /// Creates the stream over a connection. `more` closes further descriptors of the stream in forked children.
    pub(super) fn new(
        conn: DataConn,
        more: Option<ForkFd>,
        (group, purpose): (u64, Purpose),
        plane: &Plane,
        stats: &Arc<Stats>,
    ) -> Result<DataStream> {
        let DataConn { fork_fd, socket } = conn;
        let stream =
            plane.transport(socket, group, purpose).map_err(|e| Error::system("preparing a data stream", e))?;
        stats.data_opened.fetch_add(1, Relaxed);
        let fork_fds = std::iter::once(fork_fd).chain(more).collect();
        Ok(DataStream { _fork_fds: fork_fds, stream, stats: Arc::clone(stats) })
    }
}

impl Drop for DataStream {
    fn drop(&mut self) {
        self.stats.data_closed.fetch_add(1, Relaxed);
    }
}

impl Transport for DataStream {
    fn name(&self) -> &'static str {
        self.stream.name()
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> std::result::Result<usize, Broken> {
        self.stream.send(head, body)
    }

    fn recv(&mut self, into: &mut [u8]) -> std::result::Result<usize, Broken> {
        self.stream.recv(into)
    }

    fn readiness(&self) -> Readiness<'_> {
        self.stream.readiness()
    }

    fn is_wire(&self) -> bool {
        self.stream.is_wire()
    }
}

/// The connections of one lane with the other ranks of its group.
#[derive(Clone)]
pub(super) struct LaneConns {
    pub(super) control: Arc<Control>,
    pub(super) health: Arc<GroupHealth>,
    /// The group's counters.
    pub(super) stats: Arc<Stats>,
    /// Id of the group.
    pub(super) group: u64,
    /// Number of the lane.
    pub(super) channel: u32,
}

/// A connection that was begun.
pub(super) enum Awaited {
    /// This rank dials. The channel has the outcome, or disconnects after the deadline or if this rank leaves.
    Dialled(Receiver<std::result::Result<DataConn, Failed>>),
    /// The peer dials.
    Accepted(ConnKey),
}

impl LaneConns {
    /// Returns the key of the connection if the peer opens it, or `None` if this rank does. The rank with the higher
    /// world rank dials.
    fn accepted_key(&self, peer: usize, purpose: Purpose, index: u32) -> Option<ConnKey> {
        let LaneConns { health, group, channel, .. } = self;
        let (own, from) = (health.world_rank(health.rank()), health.world_rank(peer));
        (own < from).then_some(ConnKey { purpose, group: *group, channel: *channel, index, from })
    }

    /// Begins to connect with another rank of the group, for at most `limit`.
    pub(super) fn begin(&self, peer: usize, purpose: Purpose, index: u32, limit: Duration) -> Awaited {
        if let Some(key) = self.accepted_key(peer, purpose, index) {
            return Awaited::Accepted(key);
        }
        let LaneConns { control, health, group, channel, .. } = self;
        let dial = Dial { to: health.world_rank(peer), purpose, group: *group, channel: *channel, index };
        Awaited::Dialled(control.dial_lane(dial, limit))
    }

    /// Waits for a connection for at most `longest`. `None` when it is not there then; [`GroupHealth`] may know why.
    ///
    /// # Errors
    /// `System` when the peer refused it; the cause of the group's failure when the peer could not be reached.
    pub(super) fn wait(&self, peer: usize, awaited: &Awaited, longest: Duration) -> Result<Option<DataConn>> {
        let outcome = match awaited {
            Awaited::Accepted(key) => return Ok(self.control.plane.pending.take(key, longest)),
            Awaited::Dialled(outcome) => outcome.recv_timeout(longest),
        };
        match outcome {
            Ok(Ok(conn)) => Ok(Some(conn)),
            Ok(Err(Failed::Broken { how, source })) => Err(self.health.attribute_broken_stream(peer, &how, &source)),
            Ok(Err(how)) => {
                let rank = self.health.world_rank(peer);
                Err(Error::other(format!("connecting a channel to rank {rank}: {how}")))
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }
}

/// Opens the streams of one mesh of a lane.
pub(super) struct StreamOpener {
    conns: LaneConns,
    /// Index that all streams of this mesh carry, so that the meshes of one lane are not confused.
    index: u32,
    /// Group rank of each index in the mesh.
    members: Vec<usize>,
    /// For each index in the mesh, the streams that are being opened, in the order of their numbers.
    opening: HashMap<usize, VecDeque<Awaited>>,
}

impl StreamOpener {
    pub(super) fn new(conns: &LaneConns, index: u32, members: Vec<usize>) -> StreamOpener {
        StreamOpener { conns: conns.clone(), index, members, opening: HashMap::new() }
    }

    /// Returns the numbers of the streams of these batches. Each batch belongs to one peer.
    fn numbers(&self, batches: &[(usize, Batch)]) -> Result<Vec<(usize, Range<u32>)>> {
        let LaneConns { control, health, .. } = &self.conns;
        let addresses = &control.plane.world()?.addresses;
        let configured = |member: usize| addresses[health.world_rank(member)].streams;
        let own = configured(health.rank());
        let count = |peer: usize| u32::from(own.min(configured(self.members[peer])).max(1));
        let numbers = |(peer, batch): &(usize, Batch)| match batch {
            Batch::First => (*peer, 0..1),
            Batch::Others => (*peer, 1..count(*peer)),
        };
        Ok(batches.iter().map(numbers).collect())
    }

    fn index(&self, number: u32) -> u32 {
        self.index | number << NUMBER_SHIFT
    }
}

impl OpenStreams for StreamOpener {
    fn begin(&mut self, cx: &OpContext<'_>, batches: &[(usize, Batch)]) -> Result<()> {
        let LaneConns { control, health, channel, .. } = &self.conns;
        let streams = self.numbers(batches)?;
        let key =
            |peer: usize, number: u32| self.conns.accepted_key(self.members[peer], Purpose::Stream, self.index(number));
        let keys = streams.iter().flat_map(|(peer, numbers)| numbers.clone().filter_map(|number| key(*peer, number)));
        let keys: Vec<ConnKey> = keys.collect();
        let all: usize = streams.iter().map(|(_, numbers)| numbers.len()).sum();
        let rank = health.world_rank(health.rank());
        // Streams that have arrived are already open, so they need no more descriptors.
        let need = || all.saturating_sub(control.plane.arrived(&keys));
        descriptors::provide(need, format_args!("rank {rank}, which opens {all} streams of channel {channel},"))?;
        for (peer, numbers) in streams {
            let begin =
                |number| self.conns.begin(self.members[peer], Purpose::Stream, self.index(number), cx.deadline.left());
            let awaited: Vec<_> = numbers.map(begin).collect();
            self.opening.entry(peer).or_default().extend(awaited);
        }
        Ok(())
    }

    fn opened(&mut self, peer: usize) -> Result<Opened> {
        let mut opened = Opened { streams: Vec::new(), all: false };
        let Some(awaited) = self.opening.get_mut(&peer) else { return Ok(opened) };
        while let Some(next) = awaited.front() {
            let Some(conn) = self.conns.wait(self.members[peer], next, Duration::ZERO)? else { return Ok(opened) };
            let LaneConns { control, stats, group, .. } = &self.conns;
            let stream = DataStream::new(conn, None, (*group, Purpose::Stream), &control.plane, stats)?;
            opened.streams.push(Box::new(stream));
            awaited.pop_front();
        }
        self.opening.remove(&peer);
        opened.all = true;
        Ok(opened)
    }

    fn name(&self) -> &'static str {
        let config = &self.conns.control.plane.config;
        if config.tls.is_some() { Tls::NAME } else { config.transport.name_over_tcp() }
    }
}
