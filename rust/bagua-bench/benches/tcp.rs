//! Time of an all_reduce between two processes over TCP on the loopback interface, next to that of a bare pair of
//! sockets that moves the same number of bytes in both directions.
//!
//! The program starts itself again for the second rank. Calls of the two kinds alternate. Buffers are rewritten before
//! every call, and every result is checked. The table shows medians over calls of the slower rank. Arguments:
//! `--streams N` (default 1 and 2).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use bagua_core::collective::{Io, Net, Verb};
use bagua_core::group::{Lane, Options};
use bagua_core::health::GroupHealth;
use bagua_core::transport::{Mesh, Tcp, Transport};
use bagua_core::types::{DType, ReduceOp};
use rustix::event::{PollFd, PollFlags, poll};

const KIB: usize = 1024;
const SIZES: [usize; 6] = [64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16_384 * KIB, 65_536 * KIB];

/// Measuring time of each size, and the fewest calls.
const LONG_ENOUGH: (Duration, usize) = (Duration::from_millis(1500), 7);

/// Maximum number of bytes in one call of a bare socket.
const BLOCK: usize = 256 * KIB;

struct Rank {
    rank: usize,
    lane: Lane,
    /// Stream that moves the same number of bytes without any protocol.
    bare: TcpStream,
    /// Stream that carries times and decisions.
    talk: TcpStream,
}

impl Rank {
    fn new(rank: usize, streams: Vec<TcpStream>, bare: TcpStream, talk: TcpStream) -> Rank {
        let tcp = |stream| Box::new(Tcp::new(stream).expect("a connected socket")) as Box<dyn Transport>;
        let mut bundles = vec![Vec::new(), Vec::new()];
        bundles[1 - rank] = streams.into_iter().map(tcp).collect();
        let net = Net::new(Mesh::bundled(rank, vec![0, 1], bundles, None));
        let lane =
            Lane::new(Box::new(net), GroupHealth::local(rank, 2), Default::default(), 0, 0, Duration::from_secs(60));
        bare.set_nonblocking(true).expect("a connected socket");
        bare.set_nodelay(true).expect("a connected socket");
        talk.set_nodelay(true).expect("a connected socket");
        Rank { rank, lane, bare, talk }
    }

    /// Exchanges a number with the other rank.
    fn swap(&mut self, mine: u64) -> u64 {
        self.talk.write_all(&mine.to_le_bytes()).expect("the other rank lives");
        let mut theirs = [0; 8];
        self.talk.read_exact(&mut theirs).expect("the other rank lives");
        u64::from_le_bytes(theirs)
    }

    /// Sends and receives this many bytes at once.
    fn move_bare(&mut self, from: &[u8], into: &mut [u8]) {
        let (mut sent, mut got) = (0, 0);
        while sent < from.len() || got < into.len() {
            let mut moved = 0;
            if sent < from.len() {
                moved += (&self.bare).write(&from[sent..from.len().min(sent + BLOCK)]).unwrap_or(0);
                sent += moved;
            }
            if got < into.len() {
                let end = into.len().min(got + BLOCK);
                let count = (&self.bare).read(&mut into[got..end]).unwrap_or(0);
                got += count;
                moved += count;
            }
            if moved == 0 {
                let mut wanted = PollFlags::empty();
                wanted.set(PollFlags::OUT, sent < from.len());
                wanted.set(PollFlags::IN, got < into.len());
                poll(&mut [PollFd::new(&self.bare, wanted)], None).expect("a socket can be polled");
            }
        }
    }

    /// Returns the slower rank's time of one call.
    fn time(&mut self, run: impl FnOnce(&mut Rank)) -> Duration {
        self.swap(0);
        let start = Instant::now();
        run(self);
        let mine = start.elapsed().as_nanos() as u64;
        let theirs = self.swap(mine);
        Duration::from_nanos(mine.max(theirs))
    }

    /// Returns the median times of all_reduce and of bare sockets.
    fn measure(&mut self, bytes: usize) -> (Duration, Duration) {
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        let mut data = vec![0; bytes];
        let mut into = vec![0; bytes];
        let start = Instant::now();
        for turn in 0.. {
            let of = |rank: usize| (turn % 7 + 10 * rank) as f32;
            data.chunks_exact_mut(4).for_each(|element| element.copy_from_slice(&of(self.rank).to_ne_bytes()));
            let time = self.time(|rank| {
                let io = Io::in_place(&mut data);
                rank.lane
                    .run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), io)
                    .expect("both ranks live");
            });
            let sum = (of(0) + of(1)).to_ne_bytes();
            assert!(data.chunks_exact(4).all(|element| element == sum), "a wrong sum");
            let other = self.time(|rank| rank.move_bare(&data, &mut into));
            assert!(data == into, "the bare sockets lost something");
            if turn > 0 {
                ours.push(time);
                bare.push(other);
            }
            let done = ours.len() >= LONG_ENOUGH.1 && start.elapsed() > LONG_ENOUGH.0;
            let theirs = self.swap(u64::from(done)) == 1;
            // Rank 0 decides.
            let over = if self.rank == 0 { done } else { theirs };
            if over {
                break;
            }
        }
        ours.sort_unstable();
        bare.sort_unstable();
        (ours[ours.len() / 2], bare[bare.len() / 2])
    }
}

fn speed(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

fn first(streams: usize) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a loopback interface");
    let port = listener.local_addr().expect("a bound socket").port();
    let program = std::env::current_exe().expect("this program");
    let mut second = Command::new(program)
        .args(["--second", &port.to_string(), "--streams", &streams.to_string()])
        .spawn()
        .expect("a second process");
    let mut accepted = (0..streams + 2).map(|_| listener.accept().expect("the second process connects").0);
    let (bare, talk) = (accepted.next().expect("one"), accepted.next().expect("two"));
    let mut rank = Rank::new(0, accepted.collect(), bare, talk);
    println!("{streams} stream(s): bytes per second of the tensor, ours and bare sockets");
    for bytes in SIZES {
        let (ours, bare) = rank.measure(bytes);
        let ratio = bare.as_secs_f64() / ours.as_secs_f64();
        println!(
            "{:>6} KiB {:>9.1} us {:>6.2} GB/s {:>9.1} us {:>6.2} GB/s   {ratio:.2}",
            bytes / KIB,
            ours.as_secs_f64() * 1e6,
            speed(bytes, ours),
            bare.as_secs_f64() * 1e6,
            speed(bytes, bare),
        );
    }
    drop(rank);
    assert!(second.wait().expect("a child").success(), "the second rank's answers were right too");
}

fn second(port: u16, streams: usize) {
    let mut connected =
        (0..streams + 2).map(|_| TcpStream::connect(("127.0.0.1", port)).expect("the first rank listens"));
    let (bare, talk) = (connected.next().expect("one"), connected.next().expect("two"));
    let mut rank = Rank::new(1, connected.collect(), bare, talk);
    for bytes in SIZES {
        rank.measure(bytes);
    }
}

fn main() {
    if bagua_bench::listed("tcp") {
        return;
    }
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse::<u16>().ok()
    };
    let streams = value("--streams").map(usize::from);
    match (value("--second"), streams) {
        (Some(port), Some(streams)) => second(port, streams),
        (_, Some(streams)) => first(streams),
        (_, None) => [1, 2].into_iter().for_each(first),
    }
}
