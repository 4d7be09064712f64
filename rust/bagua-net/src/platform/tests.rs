//! What both halves must do, on whichever this is compiled for.

use std::net::TcpListener;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

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
    // A byte is zero in one of 256 cases, and 16 in a row in none that happens.
    assert!(one.windows(16).all(|bytes| bytes.iter().any(|byte| *byte != 0)));
}

#[test]
fn every_process_of_the_host_gets_its_identity_and_its_name() {
    assert!(!host_id().unwrap().is_empty() && host_id() == host_id());
    assert!(!host_name().is_empty() && host_name() == host_name().trim());
}

#[test]
fn open_descriptors_are_counted_and_are_those_of_a_directory() {
    let before = open_descriptors().unwrap();
    let more: Vec<_> = (0..500).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let (open, entries) = (open_descriptors().unwrap(), std::fs::read_dir(OPEN_DESCRIPTORS).unwrap().count());
    // Other tests of this process open and close a few.
    assert!(open > before + 450 && open.abs_diff(entries) < 100, "{open} after {before}, with {entries} entries");
    drop(more);
}

#[test]
fn memory_and_names_of_a_host_are_offered_together() {
    assert_eq!(shared_file("bagua-test", 4096).is_ok(), SHARES_MEMORY);
    let name = format!("bagua-test-{}", std::process::id());
    assert_eq!(listen_by_name(name.as_bytes()).is_ok(), SHARES_MEMORY);
    assert_eq!(path_of_name(name.as_bytes()).is_ok(), SHARES_MEMORY);
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

#[cfg(all(target_os = "linux", target_env = "gnu", not(bagua_portable)))]
#[test]
fn memory_that_was_freed_below_some_that_is_in_use_goes_back_to_the_system() {
    let resident = || {
        let counts = std::fs::read_to_string("/proc/self/statm").unwrap();
        counts.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
    };
    // Blocks that the allocator does not map one by one, of which the last stays.
    let mut blocks: Vec<Vec<u8>> = (0..1000).map(|_| vec![1; 64 << 10]).collect();
    let last = blocks.pop();
    drop(blocks);
    let kept = resident();
    release_memory();
    let released = kept.saturating_sub(resident());
    assert!(released > 32 << 20, "{released} of 64 MB; {last:?} is in use", last = last.map(|last| last[0]));
}
