//! The clock, and what is in flight.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::control::Message;

/// Times are nanoseconds.
pub(super) const SECOND: u64 = 1_000_000_000;
/// The latency between two ranks is between this and this plus [`JITTER`], drawn for each message.
pub(super) const LATENCY: u64 = 50_000;
/// See [`LATENCY`].
pub(super) const JITTER: u64 = 50_000;
/// What a rank needs to handle or to send a message.
pub(super) const COST: u64 = 5_000;
/// What either end needs to open a connection.
pub(super) const OPENING: u64 = 50_000;
/// 10 Gbit/s.
pub(super) const BYTES_PER_MICROSECOND: u64 = 1250;
/// When a lost message is sent again.
pub(super) const RETRANSMISSION: u64 = 200_000_000;
/// Of latency and cost of a slow rank.
pub(super) const SLOWNESS: u64 = 10;

/// What happens at a rank.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A message on a control connection.
    Message(Arc<Message>),
    /// The connection with the sender has ended.
    End,
    /// No heartbeat came from this rank for the timeout.
    Silent(usize),
    /// The sender opens a connection.
    Accept,
    /// The sender has accepted the connection.
    Accepted,
    /// The sender has one with this rank already, or knows that it is gone.
    Duplicate,
    /// There is no listener at this rank any more, or it does not answer.
    NoAnswer { rank: usize, ended: bool },
    /// The sender registers with rank 0.
    Register,
    /// All have registered: the parent has the list.
    MayFetch,
    /// The sender asks for the list.
    Fetch,
    /// The list of addresses.
    List,
    /// The exchange of addresses has failed, because this rank is lost.
    NoList(usize),
    /// The time between two heartbeats has passed.
    Tick,
    /// The rank says that it is ready for a view.
    Say,
    /// The rank repeats what may have been lost.
    Remind,
    /// The connections of a view are there.
    Connected(u64),
    /// A message of the barrier of a view, of this round.
    Barrier(u64, u32),
    /// Something happens to the rank: it is killed, frozen or cut off.
    Fault,
}

/// An event in flight.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) from: u32,
    pub(super) to: u32,
    /// When it left the sender.
    pub(super) departed: u64,
    pub(super) bytes: usize,
    pub(super) event: Event,
}

/// Events by time, and those of one time in the order in which they were added: in lists of [`Queue::SPAN`] each, of which only the first is
/// sorted. A heap of millions would be slower.
#[derive(Default)]
struct Queue {
    /// Those before `until`, ascending.
    first: VecDeque<(u64, u64, Item)>,
    until: u64,
    /// The others, by time divided by the span.
    later: BTreeMap<u64, Vec<(u64, u64, Item)>>,
    added: u64,
}

impl Queue {
    const SPAN: u64 = 20_000;

    fn push(&mut self, at: u64, item: Item) {
        self.added += 1;
        let queued = (at, self.added, item);
        if at < self.until {
            let place = self.first.partition_point(|other| other.0 <= at);
            self.first.insert(place, queued);
        } else {
            self.later.entry(at / Queue::SPAN).or_default().push(queued);
        }
    }

    fn pop(&mut self) -> Option<(u64, Item)> {
        if self.first.is_empty() {
            let (span, mut list) = self.later.pop_first()?;
            list.sort_unstable_by_key(|(at, added, _)| (*at, *added));
            (self.first, self.until) = (list.into(), (span + 1) * Queue::SPAN);
        }
        self.first.pop_front().map(|(at, _, item)| (at, item))
    }
}

/// A rank's end of the network.
#[derive(Clone, Debug, Default)]
struct Port {
    /// It handles or sends until then.
    busy_until: u64,
    is_slow: bool,
    /// By rank: when what was sent to it last arrives.
    last: BTreeMap<u32, u64>,
}

impl Port {
    fn factor(&self) -> u64 {
        if self.is_slow { SLOWNESS } else { 1 }
    }

    /// The rank is busy for so long, and for these bytes; when it has finished.
    fn work(&mut self, at: u64, cost: u64, bytes: usize) -> u64 {
        let takes = cost * self.factor() + bytes as u64 * 1000 / BYTES_PER_MICROSECOND;
        self.busy_until = self.busy_until.max(at) + takes;
        self.busy_until
    }
}

/// See the module.
pub(super) struct Network {
    queue: Queue,
    random: u64,
    ports: Vec<Port>,
    /// One in so many messages is lost and sent again; 0: none.
    loses_one_in: u64,
    /// Nothing arrives between the lower and the higher half.
    pub(super) is_cut: bool,
}

impl Network {
    pub(super) fn new(size: usize, seed: u64, loses_one_in: u64) -> Network {
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let ports = vec![Port::default(); size];
        Network { queue: Queue::default(), random, ports, loses_one_in, is_cut: false }
    }

    pub(super) fn slow_down(&mut self, rank: usize) {
        self.ports[rank].is_slow = true;
    }

    /// A number below a limit.
    pub(super) fn draw(&mut self, limit: u64) -> u64 {
        // Marsaglia's xorshift64.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % limit
    }

    /// The time that a message between two ranks takes.
    pub(super) fn latency(&mut self, a: usize, b: usize) -> u64 {
        let factor = self.ports[a].factor().max(self.ports[b].factor());
        (LATENCY + self.draw(JITTER)) * factor
    }

    pub(super) fn separates(&self, a: usize, b: usize) -> bool {
        let half = self.ports.len() / 2;
        self.is_cut && (a < half) != (b < half)
    }

    /// Something happens at a rank at this time, by itself.
    pub(super) fn at(&mut self, time: u64, rank: usize, event: Event) {
        self.queue.push(time, Item { from: rank as u32, to: rank as u32, departed: time, bytes: 0, event });
    }

    /// The connection of a killed rank ends.
    pub(super) fn end(&mut self, now: u64, from: usize, to: usize) {
        let at = now + self.latency(from, to);
        let at = self.ports[from].last.get(&(to as u32)).map_or(at, |last| at.max(last + 1));
        self.queue.push(at, Item { from: from as u32, to: to as u32, departed: 0, bytes: 0, event: Event::End });
    }

    /// A rank sends something, for which it needs its time; `trips` latencies later it arrives, after what was sent before.
    pub(super) fn send(&mut self, now: u64, from: usize, to: usize, bytes: usize, trips: u64, event: Event) -> u64 {
        let departed = self.ports[from].work(now, COST, bytes);
        if self.separates(from, to) {
            return departed;
        }
        let mut at = departed + (0..trips).map(|_| self.latency(from, to)).sum::<u64>();
        if self.loses_one_in > 0 && self.draw(self.loses_one_in) == 0 {
            at += RETRANSMISSION;
        }
        let last = self.ports[from].last.entry(to as u32).or_default();
        at = at.max(*last + 1);
        *last = at;
        self.queue.push(at, Item { from: from as u32, to: to as u32, departed, bytes, event });
        departed
    }

    /// The next event.
    pub(super) fn next(&mut self) -> Option<(u64, Item)> {
        self.queue.pop()
    }

    /// A rank handles something that came at this time; when it has finished.
    pub(super) fn handle(&mut self, at: u64, rank: usize, cost: u64, bytes: usize) -> u64 {
        self.ports[rank].work(at, cost, bytes)
    }
}
