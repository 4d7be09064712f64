//! The connections of a rank's lanes and messages: opening a transport over one, and waiting for their last bytes before the rank leaves.

use std::collections::HashSet;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::super::config::Config;
use super::super::connection::Socket;
use super::super::handshake::Purpose;
use crate::platform::{limit_unacknowledged, unsent};
use crate::transport::Transport;
use crate::wait::lock;

/// The longest that a leaving rank waits for its last bytes, however many of them the peers acknowledge meanwhile.
const LONGEST_FLUSH: Duration = Duration::from_secs(30);

/// How long a leaving rank waits for its last bytes while the peers acknowledge none: a lossy line takes long.
const STALLED: Duration = Duration::from_secs(1);

/// A connection of a lane or of messages.
struct OpenStream {
    group: u64,
    purpose: Purpose,
    /// Dangling when it is closed.
    stream: Weak<TcpStream>,
}

/// The connections of the lanes and messages of all groups of a rank.
#[derive(Default)]
pub(super) struct OpenStreams(Mutex<Vec<OpenStream>>);

/// The bytes that a leaving rank has sent and its peers have not acknowledged.
struct Unread {
    begun: Instant,
    /// The fewest so far, and since when there are no fewer.
    least: usize,
    moved: Instant,
}

impl Unread {
    fn new(now: Instant) -> Unread {
        Unread { begun: now, least: usize::MAX, moved: now }
    }

    /// True while the rank waits for the `left` bytes.
    fn is_awaited(&mut self, left: usize, now: Instant) -> bool {
        if left < self.least {
            (self.least, self.moved) = (left, now);
        }
        left > 0 && now - self.moved < STALLED && now - self.begun < LONGEST_FLUSH
    }
}

impl OpenStreams {
    /// See [`Plane::transport`](super::Plane::transport).
    pub(super) fn transport(
        &self,
        config: &Config,
        socket: Socket,
        group: u64,
        purpose: Purpose,
    ) -> io::Result<Box<dyn Transport>> {
        let mut connected = None;
        let transport = socket.into_transport(config.transport, |stream| {
            let mut streams = lock(&self.0);
            streams.retain(|open| open.stream.strong_count() > 0);
            streams.push(OpenStream { group, purpose, stream: Arc::downgrade(stream) });
            connected = Some(Arc::clone(stream));
        })?;
        // Two ranks may have no control connection, and so no heartbeats, between them. The kernel finds a cut line as
        // soon as heartbeats would.
        if let Some(stream) = connected {
            limit_unacknowledged(&stream, config.heartbeat_timeout)?;
        }
        Ok(transport)
    }

    /// See [`Plane::flush`](super::Plane::flush). `failed`: the groups that have failed.
    pub(super) fn flush(
        &self,
        group: Option<u64>,
        failed: impl Fn() -> HashSet<u64>,
        goes_on: impl Fn() -> bool,
    ) -> Vec<Weak<TcpStream>> {
        let is_left = |open: &mut OpenStream| group.is_none_or(|group| open.group == group);
        let streams: Vec<OpenStream> = lock(&self.0).extract_if(.., is_left).collect();
        let mut unread = Unread::new(Instant::now());
        while goes_on() {
            let failed = failed();
            let awaited = streams.iter().filter(|open| !failed.contains(&open.group));
            let left = awaited.filter_map(|open| open.stream.upgrade()).filter_map(|stream| unsent(&stream)).sum();
            if !unread.is_awaited(left, Instant::now()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let of_lanes = streams.into_iter().filter(|open| open.purpose == Purpose::Stream);
        of_lanes.map(|open| open.stream).collect()
    }
}

/// See [`Plane::end_streams`](super::Plane::end_streams).
pub(super) fn end(streams: &[Weak<TcpStream>]) {
    for stream in streams.iter().filter_map(Weak::upgrade) {
        // The peer may have closed it.
        let _ = stream.shutdown(Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaving_rank_waits_while_bytes_are_acknowledged_but_not_for_ever() {
        let begun = Instant::now();
        let at = |tenths: u64| begun + Duration::from_millis(100 * tenths);
        let mut stalled = Unread::new(begun);
        let waits: Vec<bool> = [0, 9, 10].map(|tenths| stalled.is_awaited(7, at(tenths))).into();
        assert_eq!(waits, [true, true, false]);
        assert!(!Unread::new(begun).is_awaited(0, begun));
        // The peer acknowledges one byte each 100 ms.
        let mut slow = Unread::new(begun);
        let waited = (0..1000).take_while(|tenths| slow.is_awaited(1000 - *tenths as usize, at(*tenths))).count();
        assert_eq!(waited, 300);
    }
}
