//! The connections of a rank's lanes and messages: opening a transport over one, and waiting for their last bytes
//! before the rank leaves.

use std::collections::HashSet;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::super::config::Config;
use super::super::connection::Socket;
use super::super::handshake::Purpose;
use crate::platform::{is_in_flight, unsent};
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
    line: Line,
}

/// The acknowledgements on a connection. There may be no heartbeats between its two ranks, so this finds a broken line.
/// TCP_USER_TIMEOUT cannot do that: it also closes a connection whose peer reads nothing for so long, because the peer
/// computes.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// Number of bytes that the peer's kernel had not acknowledged at the last look.
    unacknowledged: usize,
    /// When that number last changed, or nothing was in flight.
    since: Instant,
}

impl Line {
    /// Notes the state of the connection. Returns true if packets have been in flight for longer than `timeout`, in
    /// which this process ran, and none was acknowledged.
    fn is_broken(
        &mut self,
        unacknowledged: usize,
        is_in_flight: bool,
        timeout: Duration,
        late: Duration,
        now: Instant,
    ) -> bool {
        self.since = (self.since + late).min(now);
        if !is_in_flight || unacknowledged != self.unacknowledged {
            *self = Line { unacknowledged, since: now };
        }
        now - self.since > timeout
    }
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
        socket.into_transport(config.transport, |stream| {
            let mut streams = lock(&self.0);
            streams.retain(|open| open.stream.strong_count() > 0);
            let line = Line { unacknowledged: 0, since: Instant::now() };
            streams.push(OpenStream { group, purpose, stream: Arc::downgrade(stream), line });
        })
    }

    /// Closes the streams whose line is broken. `late`: how long this process has not run since the last call.
    pub(super) fn end_broken(&self, timeout: Duration, late: Duration, now: Instant) {
        for OpenStream { stream, line, .. } in lock(&self.0).iter_mut() {
            let Some(stream) = stream.upgrade() else { continue };
            let (Some(left), Some(is_in_flight)) = (unsent(&stream), is_in_flight(&stream)) else { continue };
            if line.is_broken(left, is_in_flight, timeout, late, now) {
                // The operation on it ends, and asks the coordinator why.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
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
        // An error is ignored, because the peer may have closed the stream already.
        let _ = stream.shutdown(Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_broken_if_packets_in_flight_are_not_acknowledged_and_a_peer_that_reads_nothing_breaks_none() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        // Seconds, bytes, in flight, time in which this process did not run.
        let broken_at = |looks: &[(u32, usize, bool, u32)]| {
            let mut line = Line { unacknowledged: 0, since: begun };
            looks.iter().position(|(at, bytes, is_in_flight, late)| {
                line.is_broken(*bytes, *is_in_flight, 3 * second, *late * second, begun + *at * second)
            })
        };
        assert_eq!(broken_at(&[(1, 9, true, 0), (2, 9, true, 0), (4, 9, true, 0), (5, 9, true, 0)]), Some(3));
        assert_eq!(broken_at(&[(1, 9, true, 0), (3, 8, true, 0), (5, 7, true, 0), (8, 6, true, 0)]), None);
        assert_eq!(broken_at(&[(1, 9, false, 0), (9, 9, false, 0), (90, 9, false, 0)]), None);
        assert_eq!(broken_at(&[(1, 9, true, 0), (60, 9, true, 58), (62, 9, true, 0)]), None);
    }

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
