//! Messengers of ranks that are threads of one process, connected over loopback.

#![allow(unsafe_code)] // Regions in the memory of tests.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use super::streams::{Dialled, Opened};
use super::*;
use crate::memory::Region;
use crate::transport::Tcp;
use crate::transport::frame::{FrameKind, Header};
use crate::wait::Waited;

const LONG: Duration = Duration::from_secs(30);

/// Streams over loopback. The first byte of a connection is the rank that opened it.
struct Loopback {
    rank: usize,
    addresses: Vec<SocketAddr>,
    listener: TcpListener,
    wake: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
    /// The watchers of all ranks.
    world: Arc<Mutex<Vec<std::sync::Weak<Loopback>>>>,
}

fn opened(stream: TcpStream) -> Opened {
    let second = stream.as_fd().try_clone_to_owned().unwrap();
    (Box::new(Tcp::new(stream).unwrap()), second)
}

struct Own(Arc<Loopback>);

impl Streams for Own {
    fn dial(&self, peer: usize, done: Dialled) {
        let mut stream = TcpStream::connect(self.0.addresses[peer]).unwrap();
        std::io::Write::write_all(&mut stream, &[self.0.rank as u8]).unwrap();
        let peer = self.0.world.lock().unwrap()[peer].upgrade();
        done(Ok(opened(stream)));
        if let Some(wake) = peer.and_then(|peer| peer.wake.lock().unwrap().clone()) {
            wake();
        }
    }

    fn arrived(&self) -> Vec<(usize, Result<Opened>)> {
        let mut found = Vec::new();
        while let Ok((mut stream, _)) = self.0.listener.accept() {
            stream.set_nonblocking(false).unwrap();
            let mut rank = [0];
            std::io::Read::read_exact(&mut stream, &mut rank).unwrap();
            found.push((usize::from(rank[0]), Ok(opened(stream))));
        }
        found
    }

    fn watch(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        *self.0.wake.lock().unwrap() = Some(wake);
    }

    fn unwatch(&self) {
        *self.0.wake.lock().unwrap() = None;
    }
}

struct Rank {
    messenger: Messenger,
    health: Arc<GroupHealth>,
    address: SocketAddr,
}

fn world(size: usize) -> Vec<Rank> {
    let listeners: Vec<_> = (0..size).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    let shared = Arc::new(Mutex::new(Vec::new()));
    let build = |(rank, listener): (usize, TcpListener)| {
        listener.set_nonblocking(true).unwrap();
        let (world, address) = (Arc::clone(&shared), addresses[rank]);
        let streams = Loopback { rank, addresses: addresses.clone(), listener, wake: Mutex::default(), world };
        let streams = Arc::new(streams);
        shared.lock().unwrap().push(Arc::downgrade(&streams));
        let health = GroupHealth::local(rank, size);
        let messenger = Messenger::over(Box::new(Own(streams)), &health, &Arc::default(), LONG, None).unwrap();
        Rank { messenger, health, address }
    };
    listeners.into_iter().enumerate().map(build).collect()
}

/// Memory that a call keeps, like a user's tensor. Can be read after the call has ended.
#[derive(Clone)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    fn of(bytes: Vec<u8>) -> Memory {
        Memory(Arc::new(Mutex::new(bytes)))
    }

    fn region(&self, dtype: DType) -> Region {
        let mut bytes = self.0.lock().unwrap();
        let (at, count) = (bytes.as_mut_ptr(), bytes.len() / dtype.size());
        // SAFETY: the vector is neither changed nor read before the call has ended, and the call keeps it alive.
        unsafe { Region::new(at, count, dtype) }.unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + seed * 13 + at / 251) as u8).collect()
}

impl Rank {
    fn send(&self, to: usize, tag: u32, bytes: Vec<u8>) -> Handle {
        let memory = Memory::of(bytes);
        let sends = vec![Message { peer: Some(to), tag, data: memory.region(DType::U8) }];
        self.messenger.post(sends, Vec::new(), None, Box::new(memory)).unwrap().handle
    }

    fn recv(&self, from: Option<usize>, tag: u32, len: usize) -> (Posted, Memory) {
        self.recv_within(from, tag, len, None)
    }

    fn recv_within(&self, from: Option<usize>, tag: u32, len: usize, limit: Option<Duration>) -> (Posted, Memory) {
        let memory = Memory::of(vec![0; len]);
        let receives = vec![Message { peer: from, tag, data: memory.region(DType::U8) }];
        let posted = self.messenger.post(Vec::new(), receives, limit, Box::new(memory.clone())).unwrap();
        (posted, memory)
    }
}

#[test]
fn crossing_messages_of_any_length_arrive() {
    let ranks = world(3);
    for len in [0, 1, posted::EAGER, posted::EAGER + 1, 3 << 20] {
        let mut receives = Vec::new();
        let mut sends = Vec::new();
        for (me, rank) in ranks.iter().enumerate() {
            for peer in (0..3).filter(|peer| *peer != me) {
                sends.push(rank.send(peer, 5, pattern(len, me)));
                receives.push((peer, rank.recv(Some(peer), 5, len)));
            }
        }
        for (peer, (posted, memory)) in receives {
            posted.handle.wait(Some(LONG)).unwrap();
            assert_eq!(memory.bytes(), pattern(len, peer), "{len} bytes of rank {peer}");
            assert_eq!(posted.senders[0].load(SeqCst), peer);
        }
        sends.iter().for_each(|send| send.wait(Some(LONG)).unwrap());
    }
}

#[test]
fn tags_may_be_received_out_of_order_and_one_tag_arrives_in_order() {
    let ranks = world(2);
    let lens = [10, 100_000, 20, 2 << 20];
    let sends: Vec<_> =
        lens.iter().enumerate().map(|(tag, len)| ranks[0].send(1, tag as u32, pattern(*len, tag))).collect();
    for (tag, len) in lens.iter().enumerate().rev() {
        let (posted, memory) = ranks[1].recv(Some(0), tag as u32, *len);
        posted.handle.wait(Some(LONG)).unwrap();
        assert_eq!(memory.bytes(), pattern(*len, tag));
    }
    sends.iter().for_each(|send| send.wait(Some(LONG)).unwrap());
    for seed in 0..40 {
        ranks[0].send(1, 9, pattern(if seed % 2 == 0 { 8 } else { 40_000 }, seed));
    }
    for seed in 0..40 {
        let (posted, memory) = ranks[1].recv(Some(0), 9, if seed % 2 == 0 { 8 } else { 40_000 });
        posted.handle.wait(Some(LONG)).unwrap();
        assert_eq!(memory.bytes()[..8], pattern(8, seed), "number {seed}");
    }
}

#[test]
fn a_receive_from_any_rank_names_its_sender() {
    let ranks = world(4);
    let receives: Vec<_> = (0..3).map(|_| ranks[0].recv(None, 1, 50_000)).collect();
    for from in [3, 1, 2] {
        ranks[from].send(0, 1, pattern(50_000, from));
    }
    let mut seen = Vec::new();
    for (posted, memory) in receives {
        posted.handle.wait(Some(LONG)).unwrap();
        let from = posted.senders[0].load(SeqCst);
        assert_eq!(memory.bytes(), pattern(50_000, from));
        seen.push(from);
    }
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3]);
}

#[test]
fn a_long_message_is_not_done_before_its_receive_is_posted_and_a_short_one_does_not_wait_for_it() {
    let ranks = world(2);
    let long = ranks[0].send(1, 1, pattern(8 << 20, 1));
    let short = ranks[0].send(1, 2, pattern(100, 2));
    let (posted, memory) = ranks[1].recv(Some(0), 2, 100);
    posted.handle.wait(Some(LONG)).unwrap();
    short.wait(Some(LONG)).unwrap();
    assert_eq!(memory.bytes(), pattern(100, 2));
    assert!(matches!(long.wait_for(Duration::from_millis(50)), Waited::Pending));
    let (posted, memory) = ranks[1].recv(Some(0), 1, 8 << 20);
    posted.handle.wait(Some(LONG)).unwrap();
    long.wait(Some(LONG)).unwrap();
    assert_eq!(memory.bytes(), pattern(8 << 20, 1));
}

#[test]
fn short_messages_that_the_peer_does_not_receive_are_kept_up_to_a_limit_and_lose_nothing() {
    let ranks = world(2);
    let count = 3 * (1 << 20) / posted::EAGER;
    // The thread of rank 1 starts with its first call.
    let _other = ranks[1].recv(Some(0), 77, 1);
    let sends: Vec<_> = (0..count).map(|seed| ranks[0].send(1, 0, pattern(posted::EAGER, seed))).collect();
    let done = |sends: &[Handle]| sends.iter().filter(|send| send.is_completed()).count();
    let until = Instant::now() + LONG;
    while done(&sends) < count / 3 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(done(&sends), count / 3, "1 MiB of 3");
    for seed in 0..count {
        let (posted, memory) = ranks[1].recv(Some(0), 0, posted::EAGER);
        posted.handle.wait(Some(LONG)).unwrap();
        assert_eq!(memory.bytes(), pattern(posted::EAGER, seed));
    }
    sends.iter().for_each(|send| send.wait(Some(LONG)).unwrap());
}

#[test]
fn messages_of_one_call_end_together_and_an_empty_call_at_once() {
    let ranks = world(2);
    let (a, b) = (Memory::of(pattern(5, 1)), Memory::of(vec![0; 70_000]));
    let sends = vec![Message { peer: Some(1), tag: 0, data: a.region(DType::U8) }];
    let receives = vec![Message { peer: Some(1), tag: 0, data: b.region(DType::F32) }];
    let both = ranks[0].messenger.post(sends, receives, None, Box::new((a, b.clone()))).unwrap();
    let (posted, memory) = ranks[1].recv(Some(0), 0, 5);
    posted.handle.wait(Some(LONG)).unwrap();
    assert_eq!(memory.bytes(), pattern(5, 1));
    assert!(!both.handle.is_completed(), "its receive is not done");
    let back = Memory::of(pattern(70_000, 2));
    let sends = vec![Message { peer: Some(0), tag: 0, data: back.region(DType::F32) }];
    ranks[1].messenger.post(sends, Vec::new(), None, Box::new(back)).unwrap();
    both.handle.wait(Some(LONG)).unwrap();
    assert_eq!(b.bytes(), pattern(70_000, 2));
    let nothing = ranks[0].messenger.post(Vec::new(), Vec::new(), None, Box::new(())).unwrap();
    assert!(nothing.handle.is_completed());
}

#[test]
fn peers_that_are_none_are_refused_and_the_group_stays_usable() {
    let ranks = world(2);
    for (peer, text) in [(Some(0), "itself"), (Some(2), "rank 2 is not in the group"), (None, "needs a destination")] {
        let memory = Memory::of(vec![1; 4]);
        let sends = vec![Message { peer, tag: 0, data: memory.region(DType::U8) }];
        let error = ranks[0].messenger.post(sends, Vec::new(), None, Box::new(memory)).err().unwrap();
        assert!(matches!(&error, Error::InvalidArgument(why) if why.contains(text)), "{error}");
    }
    ranks[0].health.check().unwrap();
    ranks[0].send(1, 0, vec![7]);
    let (posted, memory) = ranks[1].recv(Some(0), 0, 1);
    posted.handle.wait(Some(LONG)).unwrap();
    assert_eq!(memory.bytes(), [7]);
}

#[test]
fn a_message_of_another_length_or_type_is_a_mismatch_with_both_in_it() {
    for receive_first in [true, false] {
        let ranks = world(2);
        let (memory, into) = (Memory::of(pattern(8, 1)), Memory::of(vec![0; 12]));
        let send = || {
            let sends = vec![Message { peer: Some(1), tag: 3, data: memory.region(DType::F32) }];
            ranks[0].messenger.post(sends, Vec::new(), None, Box::new(memory.clone())).unwrap();
        };
        let receive = || {
            let receives = vec![Message { peer: Some(0), tag: 3, data: into.region(DType::U8) }];
            ranks[1].messenger.post(Vec::new(), receives, None, Box::new(into.clone()))
        };
        let error = if receive_first {
            let posted = receive().unwrap();
            send();
            posted.handle.wait(Some(LONG)).unwrap_err()
        } else {
            send();
            // The thread of rank 1 starts with its first call.
            let _other = ranks[1].recv(Some(0), 77, 1);
            let until = Instant::now() + LONG;
            while !ranks[1].messenger.shared.keeps_messages() && Instant::now() < until {
                std::thread::yield_now();
            }
            receive().err().unwrap()
        };
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch(_)), "{text}");
        assert!(text.contains("rank 1 receives 12 elements of uint8 (tag 3)"), "{text}");
        assert!(text.contains("rank 0, which sends 2 elements of float32"), "{text}");
        assert_eq!(ranks[1].health.check(), Err(error));
    }
}

#[test]
fn a_frame_that_a_peer_cannot_have_sent_is_an_error_that_names_it() {
    let outcome_of = |headers: Vec<u8>| {
        let ranks = world(2);
        // Posted before the frames, because the thread could otherwise see them first.
        let posted = ranks[0].recv(Some(1), 3, 8).0;
        let mut stream = TcpStream::connect(ranks[0].address).unwrap();
        std::io::Write::write_all(&mut stream, &[&[1][..], &headers, &[0; 8]].concat()).unwrap();
        posted.handle.wait(Some(LONG)).unwrap_err()
    };
    let outcome = |frames: &[Header]| outcome_of(frames.iter().flat_map(Header::encode).collect());
    let said = Fingerprint { tag: 3, ..Fingerprint::new(Kind::Send, DType::U8, 8) };
    let whole = Header::whole(said, 0, 8, 1);
    let eager = Header { frame: FrameKind::Eager, ..whole };
    let collective = Header { fingerprint: Fingerprint { kind: Kind::Barrier, ..said }, ..eager };
    for (frame, says) in [
        (whole, "bytes of a message that was not asked for"),
        (Header { offset: 4, length: 4, ..eager }, "an eager message of a wrong length"),
        (Header { frame: FrameKind::Offer, ..whole }, "bytes after a header that has none"),
        (Header { frame: FrameKind::Ready, length: 0, ..whole }, "an answer to a message that it was not sent"),
        (collective, "a frame of a collective operation"),
    ] {
        let error = outcome(&[frame]);
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch(_)) && text.contains("rank 1 sent") && text.contains(says), "{text}");
    }
    let offer = Header { frame: FrameKind::Offer, length: 0, ..whole };
    for bytes in [Header { offset: 4, ..whole }, Header { offset: 4, length: 4, ..whole }] {
        let error = outcome(&[offer, bytes]);
        assert!(error.to_string().contains("more bytes than its message has"), "{error}");
    }
    let mut changed = eager.encode();
    changed[4] = 74;
    let text = outcome_of(changed.to_vec()).to_string();
    assert!(text.ends_with("rank 1 sent an unreadable frame: an unknown operation (code 74)"), "{text}");
}

#[test]
fn a_deadline_names_who_is_missing_and_ends_the_group() {
    let ranks = world(3);
    let (posted, _) = ranks[0].recv_within(Some(2), 0, 4, Some(Duration::from_millis(30)));
    let other = ranks[0].recv(Some(1), 0, 4).0;
    let error = posted.handle.wait(Some(LONG)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[2]), "{error}");
    assert!(error.to_string().contains("send/recv"), "{error}");
    assert!(other.handle.wait(Some(LONG)).is_err());
    assert!(ranks[0].health.check().is_err());
}

#[test]
fn what_a_rank_sent_before_it_left_arrives_and_the_next_receive_says_that_it_left() {
    let mut ranks = world(2);
    for seed in 0..5 {
        ranks[0].send(1, 0, pattern(1000, seed)).wait(Some(LONG)).unwrap();
    }
    let Rank { messenger, .. } = ranks.remove(0);
    drop(messenger);
    ranks[0].health.depart(0);
    for seed in 0..5 {
        let (posted, memory) = ranks[0].recv(Some(0), 0, 1000);
        posted.handle.wait(Some(LONG)).unwrap();
        assert_eq!(memory.bytes(), pattern(1000, seed));
    }
    let error = ranks[0].recv(Some(0), 0, 1000).0.handle.wait(Some(LONG)).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 0, .. }) && error.to_string().contains("left"), "{error}");
}

#[test]
fn a_failed_group_ends_every_message_with_its_cause() {
    let ranks = world(2);
    let receive = ranks[0].recv(Some(1), 0, 10).0;
    let send = ranks[0].send(1, 0, pattern(1 << 20, 0));
    let cause = ranks[0].health.fail(Error::PeerRaised {
        rank: 1,
        host: "h".into(),
        kind: "ValueError".into(),
        message: "no".into(),
    });
    assert_eq!(receive.handle.wait(Some(LONG)), Err(cause.clone()));
    assert_eq!(send.wait(Some(LONG)), Err(cause));
}

#[test]
fn the_end_of_a_messenger_ends_what_it_has_not_done() {
    let ranks = world(2);
    let receive = ranks[0].recv(Some(1), 0, 10).0;
    ranks[0].messenger.shutdown();
    assert!(matches!(receive.handle.wait(Some(LONG)), Err(Error::Aborted(_))));
    let memory = Memory::of(vec![0; 4]);
    let receives = vec![Message { peer: Some(1), tag: 0, data: memory.region(DType::U8) }];
    assert!(ranks[0].messenger.post(Vec::new(), receives, None, Box::new(memory)).is_err());
}

#[test]
fn a_waiter_that_ends_leaves_the_progress_to_whoever_is_left() {
    let ranks = world(2);
    let first = ranks[0].recv(Some(1), 1, 4).0.handle;
    let second = ranks[0].recv(Some(1), 2, 4).0.handle;
    let last = ranks[0].recv(Some(1), 3, 4).0.handle;
    std::thread::scope(|scope| {
        let waiters = [&first, &second].map(|handle| scope.spawn(|| handle.wait(Some(LONG))));
        // A wait that ends before anything arrives.
        assert!(matches!(first.wait_for(Duration::from_millis(1)), Waited::Pending));
        ranks[1].send(0, 1, vec![1; 4]);
        let [one, two] = waiters;
        one.join().unwrap().unwrap();
        ranks[1].send(0, 2, vec![2; 4]);
        two.join().unwrap().unwrap();
    });
    ranks[1].send(0, 3, vec![3; 4]);
    let until = Instant::now() + LONG;
    while !last.is_completed() && Instant::now() < until {
        std::thread::yield_now();
    }
    assert!(last.is_completed(), "no thread waits for it");
}
