//! A network in memory, on the paused clock: links with a delay, which can be cut in either direction.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep};

use super::super::message::Notice;
use super::super::rank::{Event, Handle, Network, Rank, Unreachable};
use crate::error::Error;
use crate::wait::lock;

/// The heartbeat timeout of all tests.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(5);

/// Random numbers (SplitMix64).
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// One direction of a connection.
struct Wire {
    /// Sender and receiver.
    ends: (usize, usize),
    bytes: VecDeque<(Instant, Vec<u8>)>,
    last: Instant,
    is_closed: bool,
    reader: Option<Waker>,
}

/// One end of a connection.
pub(crate) struct Stream {
    net: Arc<Net>,
    incoming: Arc<Mutex<Wire>>,
    outgoing: Arc<Mutex<Wire>>,
    sleep: Option<Pin<Box<Sleep>>>,
}

/// The state of the network.
#[derive(Default)]
struct State {
    /// Pairs of a sender and a receiver between which nothing arrives.
    cut: HashSet<(usize, usize)>,
    /// Ranks that run.
    handles: HashMap<usize, Handle<Stream>>,
    /// Ranks whose process has ended.
    ended: HashSet<usize>,
    /// Extra delay of all that a rank sends.
    slow: HashMap<usize, Duration>,
    random: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Net {
    state: Mutex<State>,
    me: Weak<Net>,
}

impl Net {
    pub(crate) fn new(seed: u64) -> Arc<Net> {
        let state = Mutex::new(State { random: seed, ..State::default() });
        Arc::new_cyclic(|me| Net { state, me: Weak::clone(me) })
    }

    /// From now on nothing that `from` sends reaches `to`, not even the end of a connection.
    pub(crate) fn cut(&self, from: usize, to: usize) {
        lock(&self.state).cut.insert((from, to));
    }

    /// Delays everything that `rank` sends from now on by `by`.
    pub(crate) fn slow_down(&self, rank: usize, by: Duration) {
        lock(&self.state).slow.insert(rank, by);
    }

    fn is_cut(&self, (from, to): (usize, usize)) -> bool {
        lock(&self.state).cut.contains(&(from, to))
    }

    fn delay(&self, from: usize) -> Duration {
        let mut state = lock(&self.state);
        let mut random = Random(state.random);
        let micros = random.below(400);
        state.random = random.0;
        Duration::from_micros(micros) + state.slow.get(&from).copied().unwrap_or_default()
    }

    fn wire(from: usize, to: usize) -> Arc<Mutex<Wire>> {
        let (bytes, last, is_closed, reader) = (VecDeque::new(), Instant::now(), false, None);
        Arc::new(Mutex::new(Wire { ends: (from, to), bytes, last, is_closed, reader }))
    }
}

impl Wire {
    /// Wakes the reader, which may have to wait for the bytes to arrive.
    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let mut wire = lock(&this.incoming);
        let (now, is_closed) = (Instant::now(), wire.is_closed);
        match wire.bytes.front_mut() {
            Some((at, bytes)) if *at <= now => {
                let count = bytes.len().min(into.remaining());
                into.put_slice(&bytes[..count]);
                bytes.drain(..count);
                if bytes.is_empty() {
                    wire.bytes.pop_front();
                }
                Poll::Ready(Ok(()))
            }
            Some((at, _)) => {
                let mut sleep = Box::pin(tokio::time::sleep_until(*at));
                if sleep.as_mut().poll(cx).is_ready() {
                    cx.waker().wake_by_ref();
                }
                this.sleep = Some(sleep);
                Poll::Pending
            }
            None if is_closed => Poll::Ready(Ok(())),
            None => {
                wire.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Stream {
    fn close(&self) {
        let mut wire = lock(&self.outgoing);
        if !self.net.is_cut(wire.ends) {
            wire.is_closed = true;
            wire.wake();
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let mut wire = lock(&self.outgoing);
        if !self.net.is_cut(wire.ends) {
            let at = (Instant::now() + self.net.delay(wire.ends.0)).max(wire.last);
            wire.last = at;
            wire.bytes.push_back((at, from.to_vec()));
            wire.wake();
        }
        Poll::Ready(Ok(from.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close();
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.close();
    }
}

/// The network as one rank has it.
pub(crate) struct At {
    net: Arc<Net>,
    rank: usize,
}

impl Network for At {
    type Stream = Stream;

    async fn dial(&self, to: usize) -> Result<Stream, Unreachable> {
        let mut wait = Duration::from_millis(1);
        loop {
            let (there, back) = ((self.rank, to), (to, self.rank));
            if self.net.is_cut(there) || self.net.is_cut(back) {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(self.net.delay(self.rank)).await;
            let handle = lock(&self.net.state).handles.get(&to).cloned();
            if let Some(handle) = handle {
                let (forth, back) = (Net::wire(self.rank, to), Net::wire(to, self.rank));
                let end = |incoming: &Arc<Mutex<Wire>>, outgoing: &Arc<Mutex<Wire>>| Stream {
                    net: Arc::clone(&self.net),
                    incoming: Arc::clone(incoming),
                    outgoing: Arc::clone(outgoing),
                    sleep: None,
                };
                handle.accepted(self.rank, end(&forth, &back));
                return Ok(end(&back, &forth));
            }
            if lock(&self.net.state).ended.contains(&to) {
                return Err(Unreachable { error: Error::other("nothing listens there"), ended: true });
            }
            // Rank `to` does not listen yet.
            tokio::time::sleep(wait).await;
            wait = (2 * wait).min(HEARTBEAT);
        }
    }
}

/// Everything that a rank was told, with the time.
pub(crate) type Told = Arc<Mutex<Vec<(Instant, Event)>>>;

/// A rank of a test.
pub(crate) struct Runner {
    pub(crate) handle: Handle<Stream>,
    pub(crate) told: Told,
    /// Notified of everything that the rank is told.
    pub(crate) news: Arc<Notify>,
    /// Returns what [`Rank::run`] returns.
    pub(crate) task: JoinHandle<bool>,
    frozen: Arc<Mutex<Freezer>>,
}

#[derive(Default)]
struct Freezer {
    is_frozen: bool,
    waker: Option<Waker>,
}

impl Net {
    /// Starts a rank.
    pub(crate) fn start(&self, rank: usize, hosts: &[usize]) -> Runner {
        let net = self.me.upgrade().expect("it is alive");
        let told = Told::default();
        let news: Arc<Notify> = Arc::default();
        let (noted, notified) = (Arc::clone(&told), Arc::clone(&news));
        let note = move |event| {
            lock(&noted).push((Instant::now(), event));
            notified.notify_one();
        };
        let at = Arc::new(At { net: Arc::clone(&net), rank });
        let (plane, handle) = Rank::new(rank, hosts.to_vec(), HEARTBEAT, at, note);
        lock(&net.state).handles.insert(rank, handle.clone());
        let frozen: Arc<Mutex<Freezer>> = Arc::default();
        let freezer = Arc::clone(&frozen);
        let task = tokio::spawn(async move {
            let _listening = Listening(net, rank);
            let mut running = std::pin::pin!(plane.run());
            std::future::poll_fn(|cx| {
                let mut freezer = lock(&freezer);
                if freezer.is_frozen {
                    freezer.waker = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                drop(freezer);
                running.as_mut().poll(cx)
            })
            .await
        });
        Runner { handle, told, news, task, frozen }
    }
}

/// While a rank runs, others can connect to it.
struct Listening(Arc<Net>, usize);

impl Drop for Listening {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        let handle = state.handles.remove(&self.1);
        state.ended.insert(self.1);
        drop(state);
        drop(handle);
    }
}

impl Runner {
    /// Ends the process of the rank.
    pub(crate) fn kill(&self) {
        self.task.abort();
    }

    pub(crate) fn freeze(&self, is_frozen: bool) {
        let mut freezer = lock(&self.frozen);
        freezer.is_frozen = is_frozen;
        if let Some(waker) = freezer.waker.take() {
            waker.wake();
        }
    }

    /// The ranks that were reported as lost, in order.
    pub(crate) fn lost(&self) -> Vec<usize> {
        let lost = |event: &Event| match event {
            Event::Notice(Notice::Lost { rank, .. }) => Some(*rank),
            _ => None,
        };
        lock(&self.told).iter().filter_map(|(_, event)| lost(event)).collect()
    }

    /// The ranks that have left.
    pub(crate) fn left(&self) -> Vec<usize> {
        let left = |event: &Event| match event {
            Event::Notice(Notice::Left { rank, .. }) => Some(*rank),
            _ => None,
        };
        lock(&self.told).iter().filter_map(|(_, event)| left(event)).collect()
    }
}
