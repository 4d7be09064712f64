//! A transport with a limited rate, or that breaks after some bytes. Both apply to the bytes that this end sends. Wrap
//! both ends for both directions.

use std::sync::Arc;
use std::time::Duration;

use bagua_core::transport::{Broken, Readiness, Transport};

/// The faults to inject.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Limit in bytes sent per second, or `None`.
    pub rate: Option<f64>,
    /// Number of bytes sent before the stream breaks in both directions.
    pub break_after: Option<u64>,
}

/// Maximum burst after a pause, in seconds at the rate.
const BURST: f64 = 4e-3;

/// A function that returns the time since a fixed but arbitrary start. Called once per `send` with a rate.
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
}

impl<T: Transport> Fault<T> {
    /// Wraps a transport.
    pub fn new(inner: T, faults: Faults, clock: Clock) -> Fault<T> {
        let since = clock();
        Fault { inner, faults, clock, credit: 0.0, since, sent: 0 }
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
        self.inner.recv(into)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Poll
    }

    fn is_wire(&self) -> bool {
        self.inner.is_wire()
    }
}
