//! Any transport with faults put in: late, slow, or broken after a while. For tests and trials.
//!
//! Kernels can make a link slow but seldom late without privileges, and never one of several streams only. A rate and an end are put
//! into what this end sends, a delay into what it receives: wrap both ends for both directions.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Broken, Readiness, Transport};

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Bytes can be received so much later than they came.
    pub delay: Duration,
    /// Bytes sent per second; `None`: as many as there are.
    pub rate: Option<f64>,
    /// After so many bytes were sent the stream is broken, in both directions.
    pub break_after: Option<u64>,
}

/// How much may go at once after a pause, in seconds of the rate.
const BURST: f64 = 4e-3;

/// Bytes taken from the transport at a time to be held back, and the most that are held: a longer line is not believable.
const HELD: (usize, usize) = (64 << 10, 64 << 20);

/// Tells the time, from any beginning. It is asked once by every call that sends, and by those that receive where there is a delay.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// A transport with [`Faults`].
pub struct Fault<T> {
    inner: T,
    faults: Faults,
    /// The time that rate and delay go by.
    clock: Clock,
    /// Bytes that may be sent now, as of `since`.
    credit: f64,
    /// When `credit` was last counted.
    since: Duration,
    /// Bytes that were sent.
    sent: u64,
    /// What came and must not be received before its time. None of them is empty.
    held: VecDeque<(Duration, VecDeque<u8>)>,
    /// Bytes in `held`.
    holds: usize,
    /// The end, when it came: after what is held.
    end: Option<Broken>,
}

impl<T: Transport> Fault<T> {
    /// Puts faults into a transport.
    pub fn new(inner: T, faults: Faults) -> Fault<T> {
        let start = Instant::now();
        Fault::by_clock(inner, faults, Arc::new(move || start.elapsed()))
    }

    /// Puts faults into a transport that go by another clock than the system's.
    pub fn by_clock(inner: T, faults: Faults, clock: Clock) -> Fault<T> {
        let since = clock();
        Fault { inner, faults, clock, credit: 0.0, since, sent: 0, held: VecDeque::new(), holds: 0, end: None }
    }

    /// How many bytes may be sent now.
    fn allowed(&mut self) -> usize {
        let left = self.faults.break_after.map_or(u64::MAX, |limit| limit - self.sent);
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let Some(rate) = self.faults.rate else { return left };
        let now = (self.clock)();
        let earned = rate * now.saturating_sub(self.since).as_secs_f64();
        (self.credit, self.since) = ((self.credit + earned).min((rate * BURST).max(1.0)), now);
        left.min(self.credit as usize)
    }

    fn check(&self) -> Result<(), Broken> {
        let broken = self.faults.break_after.is_some_and(|limit| self.sent >= limit);
        if broken { Err(Broken::new("broken on purpose")) } else { Ok(()) }
    }

    /// Takes what came, and notes when it may be received.
    fn hold(&mut self, now: Duration) {
        while self.end.is_none() && self.holds < HELD.1 {
            let mut came = vec![0; HELD.0];
            match self.inner.recv(&mut came) {
                Ok(0) => break,
                Ok(count) => {
                    came.truncate(count);
                    self.holds += count;
                    self.held.push_back((now + self.faults.delay, came.into()));
                }
                Err(end) => self.end = Some(end),
            }
        }
    }
}

impl<T: Transport> Transport for Fault<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken> {
        self.check()?;
        let allowed = self.allowed();
        let head = &head[..head.len().min(allowed)];
        let body = &body[..body.len().min(allowed - head.len())];
        let count = if head.is_empty() && body.is_empty() { 0 } else { self.inner.send(head, body)? };
        self.sent += count as u64;
        self.credit -= count as f64;
        Ok(count)
    }

    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        self.check()?;
        if self.faults.delay.is_zero() {
            return self.inner.recv(into);
        }
        let now = (self.clock)();
        self.hold(now);
        match self.held.front_mut() {
            Some((due, bytes)) if *due <= now => {
                let count = bytes.read(into).unwrap_or(0);
                self.holds -= count;
                if bytes.is_empty() {
                    self.held.pop_front();
                }
                Ok(count)
            }
            Some(_) => Ok(0),
            None => self.end.clone().map_or(Ok(0), Err),
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Nap
    }

    fn is_wire(&self) -> bool {
        self.inner.is_wire()
    }
}
