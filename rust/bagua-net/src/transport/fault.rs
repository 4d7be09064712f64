//! Fault injection for tests and benchmarks: a transport with added delay, a limited rate, or a break after some bytes.
//!
//! The kernel can limit the rate of a network interface, but delays need a kernel module that is often missing, and
//! neither can be applied to only one of several streams. Rate and break apply to the bytes that this end sends, and
//! delay to those that it receives. Wrap both ends for both directions.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Broken, Readiness, Transport};

/// The faults to inject.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Time from the arrival of bytes until they can be received.
    pub delay: Duration,
    /// Limit in bytes sent per second, or `None`.
    pub rate: Option<f64>,
    /// Number of bytes sent before the stream breaks in both directions.
    pub break_after: Option<u64>,
}

/// Maximum burst after a pause, in seconds at the rate.
const BURST: f64 = 4e-3;

/// Bytes received from the inner transport at a time while bytes are delayed.
const BLOCK: usize = 64 << 10;

const DELAYED_LIMIT: usize = 64 << 20;

/// A function that returns the time since a fixed but arbitrary start. Called once per `send` with a rate, and once per
/// `recv` with a delay.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// A transport with injected [`Faults`].
pub struct Fault<T> {
    inner: T,
    faults: Faults,
    clock: Clock,
    /// Number of bytes that may be sent, as of `since`.
    credit: f64,
    /// Time when `credit` was last updated.
    since: Duration,
    sent: u64,
    /// Delayed bytes, and the time from which they can be received. No block is empty.
    delayed: VecDeque<(Duration, VecDeque<u8>)>,
    delayed_len: usize,
    /// Error of the inner transport, which is returned after the delayed bytes.
    end: Option<Broken>,
}

impl<T: Transport> Fault<T> {
    /// Wraps a transport.
    pub fn new(inner: T, faults: Faults) -> Fault<T> {
        let start = Instant::now();
        Fault::by_clock(inner, faults, Arc::new(move || start.elapsed()))
    }

    /// Wraps a transport, with a clock other than the system's.
    pub fn by_clock(inner: T, faults: Faults, clock: Clock) -> Fault<T> {
        let since = clock();
        Fault { inner, faults, clock, credit: 0.0, since, sent: 0, delayed: VecDeque::new(), delayed_len: 0, end: None }
    }

    /// Returns the number of bytes that may be sent now.
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
        if broken { Err(Broken::new("an injected fault broke the stream")) } else { Ok(()) }
    }

    /// Receives the bytes that have arrived, and stores the time from which they can be delivered.
    fn delay(&mut self, now: Duration) {
        while self.end.is_none() && self.delayed_len < DELAYED_LIMIT {
            let mut block = vec![0; BLOCK];
            match self.inner.recv(&mut block) {
                Ok(0) => break,
                Ok(count) => {
                    block.truncate(count);
                    self.delayed_len += count;
                    self.delayed.push_back((now + self.faults.delay, block.into()));
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
        self.delay(now);
        match self.delayed.front_mut() {
            Some((due, bytes)) if *due <= now => {
                let count = bytes.read(into).unwrap_or(0);
                self.delayed_len -= count;
                if bytes.is_empty() {
                    self.delayed.pop_front();
                }
                Ok(count)
            }
            Some(_) => Ok(0),
            None => self.end.clone().map_or(Ok(0), Err),
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Poll
    }

    fn is_wire(&self) -> bool {
        self.inner.is_wire()
    }
}
