//! Tests of the system calls.

use std::io::{Read, Write};
use std::net::TcpListener;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::memory::Arena;

#[test]
fn a_waker_is_readable_from_the_first_wake_to_the_next_clear() {
    let waker = Waker::new().unwrap();
    let readable = || {
        let mut wanted = [PollFd::new(&waker, PollFlags::IN)];
        poll(&mut wanted, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    // The second round has more wakes than fit into the buffers of a connection.
    for wakes in [1, 10_000] {
        assert!(!readable());
        (0..wakes).for_each(|_| waker.wake());
        assert!(readable());
        waker.clear();
    }
    assert!(!readable());
}

#[test]
fn random_bytes_fill_memory_of_any_length_and_do_not_repeat() {
    let drawn = |len| {
        let mut bytes = vec![0; len];
        random(&mut bytes).unwrap();
        bytes
    };
    assert!(drawn(0).is_empty());
    let (one, two) = (drawn(1000), drawn(1000));
    assert_ne!(one, two);
    // One random byte in 256 is zero. Sixteen in a row do not happen in practice.
    assert!(one.windows(16).all(|bytes| bytes.iter().any(|byte| *byte != 0)));
}

#[test]
fn open_descriptors_are_counted_and_are_those_of_a_directory() {
    let before = open_descriptors().unwrap();
    let more: Vec<_> = (0..500).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let (open, entries) = (open_descriptors().unwrap(), std::fs::read_dir(OPEN_DESCRIPTORS).unwrap().count());
    // Other tests of this process may open and close a few descriptors at the same time.
    assert!(open > before + 450 && open.abs_diff(entries) < 100, "{open} after {before}, with {entries} entries");
    drop(more);
}

#[test]
fn a_set_of_processors_has_what_was_added_and_not_removed() {
    let mut set = Processors::only(3);
    set.add(Processors::MAX - 1);
    set.add(64);
    set.add(64);
    assert_eq!(set.iter().collect::<Vec<_>>(), [3, 64, Processors::MAX - 1]);
    set.remove(3);
    set.remove(4);
    assert_eq!((set.count(), set.contains(3), set.contains(64)), (2, false, true));
    assert_eq!(Processors::NONE.iter().count(), 0);
}

#[test]
fn memory_that_could_shrink_under_us_is_refused() {
    let file = rustix::fs::memfd_create("bagua-test", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    assert_eq!(sealed_len(file.as_fd()).unwrap(), None);
    assert!(Arena::from_fd(file).is_err());
}

#[test]
fn bytes_count_until_the_peer_has_room_for_them() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    assert_eq!(unsent(&own), Some(0));
    own.set_nonblocking(true).unwrap();
    let block = vec![1; 1 << 20];
    let mut sent = 0;
    while let Ok(count) = own.write(&block) {
        sent += count;
    }
    assert!(unsent(&own).unwrap() > 0, "{sent} bytes fill both buffers");
    let mut taken = vec![0; sent];
    peer.read_exact(&mut taken).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while unsent(&own).unwrap() > 0 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
}

#[test]
fn a_thread_is_kept_to_processors_and_no_other_with_it() {
    let own = processors(0).unwrap();
    let one = own.iter().next().unwrap();
    let kept = move || {
        set_processors(&Processors::only(one)).unwrap();
        assert_eq!(processor(), Some(one as u32));
        assert_eq!(processors(thread_number()).unwrap(), Processors::only(one));
        set_processors(&Processors::NONE).unwrap_err();
    };
    std::thread::spawn(kept).join().unwrap();
    assert_eq!(processors(0).unwrap(), own);
}
