//! Models of the ring: two threads act as two ranks, over one mapping, with rings of 512 bytes.
//!
//! loom reports a byte that one end writes while the other may read it, or the reverse, and a missed wake-up. Each
//! model names the bugs in `transport/shm.rs` that it was seen to find.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::{capacity, ring_links, rings_len};
use crate::memory::Arena;
use crate::sync::model::explore;
use crate::transport::Transport;
use crate::wait::Doorbell;

/// Number of bytes sent and received at a time. Shared memory is tracked in blocks of this size.
const BLOCK: usize = 64;

/// Returns the links of two ranks to each other, and their doorbells.
fn pair() -> [(Box<dyn Transport>, Doorbell); 2] {
    let arena = Arc::new(Arena::create("bagua-model", rings_len(2)).unwrap());
    [0, 1].map(|index| {
        let (mut links, bell) = ring_links(&arena, 0, index, 2);
        (links[1 - index].take().unwrap(), bell)
    })
}

/// Returns `blocks` blocks, starting with number `from`. Each block is filled with its number.
fn data(from: usize, blocks: usize) -> Vec<u8> {
    (from..from + blocks).flat_map(|block| [block as u8; BLOCK]).collect()
}

/// Sends all blocks. Each message has a head of one block.
fn send_all((link, bell): &mut (Box<dyn Transport>, Doorbell), blocks: usize) {
    let mut sent = 0;
    while sent < blocks {
        let seen = bell.rings();
        match link.send(&data(sent, 1), &data(sent + 1, blocks - sent - 1)).unwrap() {
            0 => bell.wait(seen, Duration::from_secs(60)),
            some => sent += some / BLOCK,
        }
    }
}

/// Receives all blocks, at most `most` at a time.
fn receive_all((link, bell): &mut (Box<dyn Transport>, Doorbell), blocks: usize, most: usize) {
    let (mut received, mut buffer) = (0, vec![0; most * BLOCK]);
    while received < blocks {
        let seen = bell.rings();
        match link.recv(&mut buffer).unwrap() {
            0 => bell.wait(seen, Duration::from_secs(60)),
            some => {
                assert_eq!(buffer[..some], data(received, some / BLOCK));
                received += some / BLOCK;
            }
        }
    }
}

/// Finds a count published or loaded with `Relaxed` on either end, a writer that publishes before the bytes are
/// written, takes one block more than there is room for, or rings the doorbell before it publishes, and an end that
/// does not ring at all.
#[test]
fn bytes_arrive_once_in_order_beyond_the_end_of_the_ring() {
    explore(|| {
        let [mut left, mut right] = pair();
        let blocks = capacity(2) / BLOCK + 3;
        let sender = thread::spawn(move || {
            send_all(&mut left, blocks);
            left
        });
        receive_all(&mut right, blocks, 5);
        drop(sender.join().unwrap());
    });
}

/// Deadlocks if the reader rings before it publishes.
#[test]
fn a_reader_that_empties_the_ring_at_once_wakes_the_writer() {
    explore(|| {
        let [mut left, mut right] = pair();
        let blocks = capacity(2) / BLOCK;
        let sender = thread::spawn(move || {
            send_all(&mut left, blocks + 1);
            left
        });
        receive_all(&mut right, blocks + 1, blocks);
        drop(sender.join().unwrap());
    });
}

/// The rings of both directions at once, so that each rank's doorbell serves two rings. Finds a writer that publishes
/// or loads with `Relaxed`, publishes before the bytes are written, does not ring, or rings before it publishes.
#[test]
fn both_directions_at_once_share_a_bell() {
    explore(|| {
        let [mut left, mut right] = pair();
        let other = thread::spawn(move || {
            send_all(&mut left, 2);
            receive_all(&mut left, 2, 2);
            left
        });
        send_all(&mut right, 2);
        receive_all(&mut right, 2, 2);
        drop(other.join().unwrap());
    });
}

/// Finds a closed flag that is set or read with `Relaxed`, a reader that does not check for bytes again after it saw
/// the flag, and a link that does not ring when it is dropped. The second check may load with `Relaxed`, because
/// reading the flag already orders it.
#[test]
fn bytes_sent_before_the_peer_went_away_arrive_and_then_the_stream_is_broken() {
    explore(|| {
        let [mut left, mut right] = pair();
        let sender = thread::spawn(move || send_all(&mut left, 2));
        receive_all(&mut right, 2, 1);
        let (link, bell) = &mut right;
        loop {
            let seen = bell.rings();
            match link.recv(&mut [0; BLOCK]) {
                Ok(0) => bell.wait(seen, Duration::from_secs(60)),
                Ok(_) => panic!("bytes that were never sent"),
                Err(_) => break,
            }
        }
        sender.join().unwrap();
    });
}

/// Deadlocks if a dropped link does not ring, or rings before it closes the ring.
#[test]
fn a_writer_that_waits_for_room_is_woken_when_the_reader_goes_away() {
    explore(|| {
        let [(mut link, bell), (other, _)] = pair();
        let reader = thread::spawn(move || drop(other));
        loop {
            let seen = bell.rings();
            match link.send(&[], &data(0, capacity(2) / BLOCK)) {
                Ok(0) => bell.wait(seen, Duration::from_secs(60)),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        reader.join().unwrap();
    });
}
