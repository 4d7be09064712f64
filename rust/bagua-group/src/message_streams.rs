//! The streams of a group's messages: one for each direction between two ranks. The sender opens it with its first
//! message.
//!
//! Streams of a lane are opened by both ends. Streams of messages cannot be, because a rank need not know that another
//! rank will send to it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{ConnKey, DataConn};
use super::control::{Control, Dial, Plane};
use super::fork::ForkFd;
use super::handshake::Purpose;
use super::streams::DataStream;
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::stats::Stats;

/// Opens and accepts the streams of one group's messages.
pub struct MessageStreams {
    control: Arc<Control>,
    health: Arc<GroupHealth>,
    /// The group's counters.
    stats: Arc<Stats>,
    /// Id of the group.
    group: u64,
    /// Time limit for connecting.
    limit: Duration,
}

/// Creates the stream over a connection, and a second descriptor of the connection to wait on.
fn stream(conn: DataConn, group: u64, plane: &Plane, stats: &Arc<Stats>) -> Result<(DataStream, OwnedFd)> {
    let Some(tcp) = conn.socket.tcp() else {
        return Err(Error::other("a stream of messages that is not a TCP connection"));
    };
    let second = tcp.as_fd().try_clone_to_owned().map_err(|e| Error::system("preparing a stream of messages", e))?;
    let registered = ForkFd::new(&second);
    Ok((DataStream::new(conn, Some(registered), (group, Purpose::Messages), plane, stats)?, second))
}

impl MessageStreams {
    pub(super) fn new(
        control: &Arc<Control>,
        health: &Arc<GroupHealth>,
        stats: &Arc<Stats>,
        group: u64,
        limit: Duration,
    ) -> MessageStreams {
        let (control, health, stats) = (Arc::clone(control), Arc::clone(health), Arc::clone(stats));
        MessageStreams { control, health, stats, group, limit }
    }

    /// Starts to connect to a group rank.
    ///
    /// The control thread calls `done` with the stream, with the reason why the peer refused or this rank gave up, or
    /// with `System` if the process may not open more descriptors. If the group is left first, `done` is not called.
    pub fn dial(&self, peer: usize, done: impl FnOnce(Result<(DataStream, OwnedFd)>) + Send + 'static) {
        let rank = self.health.world_rank(peer);
        // Two descriptors for this stream, and two for the stream in the other direction.
        let plane = Arc::clone(&self.control.plane);
        let need = move || 4usize.saturating_sub(plane.arrived(&[]));
        let what = format!("rank {}, which opens a stream of messages,", self.health.world_rank(self.health.rank()));
        let dial = Dial { to: rank, purpose: Purpose::Messages, group: self.group, channel: 0, index: 0 };
        let timed_out = self.health.timed_out(
            self.limit,
            &[peer],
            crate::error::Progress { what: "opening a stream of messages".to_owned(), ..Default::default() },
        );
        let (plane, stats, group) = (Arc::clone(&self.control.plane), Arc::clone(&self.stats), self.group);
        self.control.dial_messages(dial, need, what, Instant::now() + self.limit, move |outcome| {
            done(match outcome {
                Some(Ok(conn)) => stream(conn, group, &plane, &stats),
                Some(Err(how)) => Err(Error::other(format!("connecting a stream of messages to rank {rank}: {how}"))),
                None => Err(timed_out),
            });
        });
    }

    /// Returns the streams that peers have opened since the last call, with their group ranks.
    pub fn arrived(&self) -> Vec<(usize, Result<(DataStream, OwnedFd)>)> {
        let plane = &self.control.plane;
        let found = plane.pending.take_messages(self.group);
        let rank_of = |key: &ConnKey| self.health.world_ranks().iter().position(|rank| *rank == key.from);
        let stream = |conn| stream(conn, self.group, plane, &self.stats);
        found.into_iter().filter_map(|(key, conn)| Some((rank_of(&key)?, stream(conn)))).collect()
    }

    /// Calls `wake` whenever a peer has opened a stream, until [`MessageStreams::unwatch`].
    pub fn watch(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.control.plane.pending.watch(self.group, wake);
    }

    /// Ends the calls of [`MessageStreams::watch`].
    pub fn unwatch(&self) {
        self.control.plane.pending.unwatch(self.group);
    }
}
