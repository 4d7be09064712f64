//! The limit of file descriptors. Alone in its file, because the limit is that of the whole process.

mod group_world;

use std::time::Instant;

use bagua_collectives::{Io, Verb};
use bagua_group::{Bootstrap, Config, Group, Lane, Options, TransportChoice};
use bagua_kernels::error::{Error, Result};
use bagua_kernels::types::{DType, ReduceOp};
use bagua_net::platform::OPEN_DESCRIPTORS;
use group_world::{config, world_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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

fn meet(lanes: &mut [Lane]) {
    std::thread::scope(|scope| {
        for lane in lanes {
            scope.spawn(|| sum(lane).unwrap());
        }
    });
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

#[test]
fn a_rank_raises_the_soft_limit_as_far_as_its_world_needs_and_fails_at_the_hard_limit() {
    let tcp = |world_size: usize| {
        let mut config = config(0, world_size);
        config.transport = TransportChoice::Tcp;
        config
    };
    let hard = getrlimit(Resource::Nofile).maximum;

    // A limit that suffices stays as it is.
    limit(512, hard);
    drop(Bootstrap::bind(tcp(8)).unwrap());
    assert_eq!(soft(), 512);
    // A world of one needs no connections.
    limit(16, hard);
    drop(Bootstrap::bind(tcp(1)).unwrap());
    assert_eq!(soft(), 16);

    // Ranks of one process raise it one after the other, and each lane raises it for the streams that it opens.
    limit(64, hard);
    let groups = world_with(6, |config| config.transport = TransportChoice::Tcp);
    let mut all: Vec<Vec<Lane>> = (0..6).map(|_| lanes(&groups)).collect();
    all.iter_mut().for_each(|lanes| meet(lanes));
    assert!(open() > 6 * 5 * (1 + 6 * 2));
    assert!((open()..open() + 1000).contains(&soft()), "{} of {}", open(), soft());
    drop((all, groups));

    // Streams that the hard limit forbids fail the group on every rank, with the reason.
    let groups = world_with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.streams_per_peer = 64;
    });
    let allowed = open() + 60;
    limit(allowed, Some(allowed));
    let start = Instant::now();
    let mut lanes = lanes(&groups);
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let fails = |lane: &mut Lane| sum(lane).unwrap_err();
        let threads: Vec<_> = lanes.iter_mut().map(|lane| scope.spawn(move || fails(lane))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Where idle streams could be closed it would wait for 30 s.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    for error in errors {
        assert!(refusal(error, allowed).contains("64 streams"));
    }
    drop((lanes, groups));

    // A world that needs more than the hard limit fails before anything is sent.
    let all_pairs = Config { full_mesh: 100, ..tcp(100) };
    let Err(error) = Bootstrap::bind(all_pairs) else { panic!("{} descriptors were enough", soft()) };
    let text = refusal(error, allowed);
    assert!(text.contains(&format!("{}", 99 + 10 + open())), "{text}");
}
