//! The limit of file descriptors.

use bagua_collectives::{Io, Verb};
use bagua_group::{Bootstrap, Config, Group, Lane, Options, TransportChoice};
use bagua_kernels::error::{Error, Result};
use bagua_kernels::types::{DType, ReduceOp};
use bagua_net::platform::OPEN_DESCRIPTORS;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::alone;
use crate::group_world::{config, this_program, world_with};

fn limit(current: u64, maximum: Option<u64>) {
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum }).unwrap();
}

fn soft() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

fn open() -> u64 {
    std::fs::read_dir(OPEN_DESCRIPTORS).unwrap().count() as u64 - 1
}

fn lanes(groups: &[Group]) -> Vec<Lane> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.iter().map(|group| scope.spawn(|| group.lane().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An all_reduce with messages that are divided between streams, so that all open.
fn sum(lane: &mut Lane) -> Result<()> {
    let mut data = vec![0; 400_000];
    lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
}

/// The text of the error of a rank that may not open as many descriptors as it needs.
fn refusal(error: Error, allowed: u64) -> String {
    assert!(matches!(error, Error::System { .. }), "{error:?}");
    let text = error.to_string();
    for word in ["file descriptors", "ulimit", &allowed.to_string()] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    text
}

fn tcp(world_size: usize) -> Config {
    Config { transport: TransportChoice::Tcp, ..config(0, world_size) }
}

#[test]
fn a_rank_raises_the_soft_limit_to_the_hard_limit() {
    let _alone = alone();
    let before = getrlimit(Resource::Nofile);
    limit(64, before.maximum);
    // A world of one needs no connections.
    drop(Bootstrap::bind(tcp(1)).unwrap());
    assert_eq!(soft(), 64);
    drop(Bootstrap::bind(tcp(8)).unwrap());
    assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);
    setrlimit(Resource::Nofile, before).unwrap();
}

#[test]
fn what_the_hard_limit_forbids_is_an_error_that_names_the_limit() {
    // In a process of its own, because a hard limit cannot be raised again.
    let entry = ["limits::entry_of_a_process_with_a_low_hard_limit", "--exact", "--ignored"];
    assert!(this_program().args(entry).status().unwrap().success());
}

#[test]
#[ignore = "the test above starts a process that runs this"]
fn entry_of_a_process_with_a_low_hard_limit() {
    // Streams that the hard limit forbids fail the group on every rank, with the reason.
    let groups = world_with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.streams_per_peer = 64;
    });
    let allowed = open() + 60;
    limit(allowed, Some(allowed));
    let mut lanes = lanes(&groups);
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let fails = |lane: &mut Lane| sum(lane).unwrap_err();
        let threads: Vec<_> = lanes.iter_mut().map(|lane| scope.spawn(move || fails(lane))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        assert!(refusal(error, allowed).contains("64 streams"));
    }
    drop((lanes, groups));

    // A world that needs more than the hard limit fails before anything is sent.
    let Err(error) = Bootstrap::bind(tcp(100)) else { panic!("{} descriptors were enough", soft()) };
    let text = refusal(error, allowed);
    assert!(text.contains(&format!("{}", 99 + 10 + open())), "{text}");
}
