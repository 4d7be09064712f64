//! How long a peer has been silent, in time during which this process ran.
//!
//! A process that was stopped, or got no processor, has not read what its peers sent meanwhile: that time is no silence of theirs.

use std::time::{Duration, Instant};

pub(super) use crate::platform::is_stopped;

/// For how long a thread that wakes up periodically should have run, and did not.
#[derive(Debug)]
pub(super) struct Lateness {
    period: Duration,
    /// When it ran last.
    last: Instant,
}

impl Lateness {
    pub(super) fn new(period: Duration, now: Instant) -> Lateness {
        Lateness { period, last: now }
    }

    /// The time by which this call is later than a period after the one before.
    pub(super) fn next(&mut self, now: Instant) -> Duration {
        let late = now.saturating_duration_since(self.last).saturating_sub(self.period);
        self.last = now;
        late
    }
}

/// The silence of one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    /// Arrival of its last message, and later by the time in which this process did not run since.
    since: Instant,
}

impl From<Instant> for Silence {
    fn from(since: Instant) -> Silence {
        Silence { since }
    }
}

impl Silence {
    /// True when it has lasted for longer than `timeout`, without the last `late`, in which this process did not run.
    pub(super) fn exceeds(&mut self, timeout: Duration, now: Instant, late: Duration) -> bool {
        self.since = (self.since + late).min(now);
        self.has_lasted(timeout, now)
    }

    /// True when it has lasted for longer than this, by the last call of [`Silence::exceeds`].
    pub(super) fn has_lasted(&self, time: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.since) > time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// When a thread with a period of 1 s calls a peer silent that sends nothing, by the seconds between its calls and a timeout of 3 s.
    fn silent_at(pauses: &[u32]) -> Option<usize> {
        let start = Instant::now();
        let (mut lateness, mut silence, mut now) = (Lateness::new(SECOND, start), Silence::from(start), start);
        pauses.iter().position(|pause| {
            now += SECOND * *pause;
            silence.exceeds(3 * SECOND, now, lateness.next(now))
        })
    }

    #[test]
    fn a_peer_is_silent_after_the_timeout_and_the_time_in_which_this_thread_did_not_run_does_not_count() {
        for (pauses, expected) in [
            (&[1, 1, 1, 1, 1][..], Some(3)),
            (&[100, 1, 1, 1], Some(3)),
            (&[1, 100, 1, 1], Some(3)),
            (&[1, 1, 1, 100, 1], Some(3)),
            (&[50, 50, 50], None),
            (&[1, 1, 1], None),
        ] {
            assert_eq!(silent_at(pauses), expected, "{pauses:?}");
        }
    }

    #[test]
    fn this_process_is_not_stopped_and_one_that_does_not_exist_is_not_either() {
        assert!(!is_stopped(std::process::id()));
        assert!(!is_stopped(u32::MAX));
    }
}
