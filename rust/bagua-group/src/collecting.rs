//! Waits that let a rank handle many events in quick succession together.

use std::time::{Duration, Instant};

/// A wait that becomes longer while events keep coming, so that few messages are sent if many ranks leave or are lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Collecting {
    first: Duration,
    longest: Duration,
    /// End and length of the last wait.
    last: Option<(Instant, Duration)>,
}

impl Collecting {
    /// Creates it with the lengths of the first and of the longest wait.
    pub(super) fn new(first: Duration, longest: Duration) -> Collecting {
        Collecting { first, longest, last: None }
    }

    /// Returns the time to wait for more events after a new one. It doubles if the last wait ended a short time ago.
    pub(super) fn wait(&mut self, now: Instant) -> Duration {
        let wait = match self.last {
            Some((ended, before)) if now.saturating_duration_since(ended) < 2 * before => {
                (2 * before).min(self.longest)
            }
            _ => self.first,
        };
        self.last = Some((now + wait, wait));
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_is_collected_for_longer_while_more_of_it_comes() {
        let (first, longest) = (Duration::from_millis(20), Duration::from_millis(320));
        let mut collecting = Collecting::new(first, longest);
        let mut now = Instant::now();
        for expected in [20, 40, 80, 160, 320, 320] {
            let wait = collecting.wait(now);
            assert_eq!(wait, Duration::from_millis(expected));
            now += wait;
        }
        assert_eq!(collecting.wait(now + 2 * longest), first);
    }
}
