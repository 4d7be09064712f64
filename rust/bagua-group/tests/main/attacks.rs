//! Invalid connections to the listening port are refused and counted, and the group keeps working.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::group_world::{PATIENCE, cause, config, connect_all, port, until};
use bagua_group::{Bootstrap, Group, VERSION};
use bagua_kernels::error::Error;

/// A world of two whose rank 0 gets invalid connections.
struct Target {
    groups: Vec<Group>,
    port: u16,
}

impl Target {
    fn new() -> Target {
        let bootstraps: Vec<Bootstrap> = (0..2).map(|rank| Bootstrap::bind(config(rank, 2)).unwrap()).collect();
        let addresses: Vec<Vec<u8>> = bootstraps.iter().map(|bootstrap| bootstrap.address().to_vec()).collect();
        let groups = connect_all(bootstraps, &addresses).into_iter().map(|group| group.unwrap()).collect();
        Target { groups, port: port(&addresses[0]) }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn refused(&self) -> u64 {
        self.groups[0].stats().connections_refused.load(Ordering::Relaxed)
    }

    /// Asserts that `count` connections were refused, and that lanes and failures of the group still work.
    #[track_caller]
    fn still_works(&self, count: u64) {
        until("refused connections are counted", || self.refused() >= count);
        assert_eq!(self.refused(), count);
        self.groups.iter().for_each(|group| group.health().check().unwrap());
        std::thread::scope(|scope| {
            let lanes: Vec<_> = self.groups.iter().map(|group| scope.spawn(|| group.lane().unwrap())).collect();
            lanes.into_iter().for_each(|lane| assert_eq!(lane.join().unwrap().size(), 2));
        });
        self.groups[1].raise("ValueError", "bad number");
        assert!(matches!(cause(&self.groups[0]), Error::PeerRaised { rank: 1, .. }));
    }
}

/// The hello of rank 1 of 2, with a change.
fn hello(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = b"BGhello\n".to_vec();
    bytes.extend(VERSION.to_le_bytes());
    for rank in [2u32, 1, 0] {
        bytes.extend(rank.to_le_bytes());
    }
    bytes.push(1);
    bytes.extend([0; 8 + 4 + 4 + 8 + 32]);
    change(&mut bytes);
    bytes
}

/// All bytes of the server's answer.
fn answer(mut stream: TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    // A reset ends the answer, too.
    let _ = stream.read_to_end(&mut all);
    all
}

#[test]
fn random_bytes_are_refused() {
    let target = Target::new();
    let mut state = 88_172_645_463_325_252_u64;
    for length in [1usize, 78, 79, 80, 5000] {
        let mut stream = target.connect();
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .take(length)
        .collect();
        stream.write_all(&bytes).unwrap();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert!(answer(stream).is_empty());
    }
    target.still_works(5);
}

#[test]
fn other_protocols_and_huge_lengths_are_refused() {
    let target = Target::new();
    for bytes in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 4096], &[0; 4096]] {
        let mut stream = target.connect();
        stream.write_all(bytes).unwrap();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert!(answer(stream).is_empty());
    }
    target.still_works(3);
}

#[test]
fn truncated_hellos_are_refused() {
    let target = Target::new();
    let whole = hello(|_| ());
    for end in [0, 8, 40, whole.len() - 1] {
        let mut stream = target.connect();
        stream.write_all(&whole[..end]).unwrap();
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert!(answer(stream).is_empty());
    }
    target.still_works(4);
}

#[test]
fn hellos_with_wrong_fields_are_refused_with_the_code_of_the_field() {
    let target = Target::new();
    let codes = [
        (hello(|bytes| bytes[8] = 99), 1),
        (hello(|bytes| bytes[8] = 6), 1),
        (hello(|bytes| bytes[10] = 3), 2),
        // The job is not secret, but random.
        (hello(|_| ()), 3),
        (hello(|bytes| bytes[14] = 7), 4),
        (hello(|bytes| bytes[18] = 1), 4),
        (hello(|bytes| bytes[22] = 200), 6),
    ];
    for (bytes, code) in &codes {
        let mut stream = target.connect();
        stream.write_all(bytes).unwrap();
        let answer = answer(stream);
        // The server's version follows the code that refuses a version.
        let version = VERSION.to_le_bytes();
        let version: &[u8] = if *code == 1 { &version } else { &[] };
        assert_eq!(answer, [&[1, *code], version].concat());
    }
    target.still_works(codes.len() as u64);
}

#[test]
fn a_silent_and_a_slow_client_are_dropped_while_others_are_served() {
    let target = Target::new();
    let silent = target.connect();
    let slow = target.connect();
    let feeder = {
        let mut slow = slow.try_clone().unwrap();
        std::thread::spawn(move || {
            for byte in hello(|_| ()) {
                if slow.write_all(&[byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(300));
            }
        })
    };
    assert!(answer(silent).is_empty());
    assert!(answer(slow).is_empty());
    target.still_works(2);
    feeder.join().unwrap();
}

#[test]
fn a_flood_of_connections_is_refused_and_counted() {
    let target = Target::new();
    let flood: Vec<TcpStream> = (0..400).map(|_| target.connect()).collect();
    until("connections beyond the limit are refused", || target.refused() >= 100);
    drop(flood);
    target.still_works(400);
}
