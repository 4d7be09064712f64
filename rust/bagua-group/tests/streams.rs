//! The configuration between hosts: number of streams per peer, and algorithm of all_reduce.

mod group_world;

use bagua_collectives::{Algorithm, Io, Verb};
use bagua_group::{Bootstrap, Config, Group, Lane, Options, TransportChoice};
use bagua_types::error::Error;
use bagua_types::types::{DType, ReduceOp};
use group_world::{try_world, world_with};

fn sum(groups: &[Group]) {
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| {
                let mut lane: Lane = group.lane().unwrap();
                let mut data = (lane.rank() as f32 + 1.0).to_le_bytes().repeat(500_000);
                lane.run(&Options::default(), DType::F32, Verb::AllReduce(ReduceOp::Sum), Io::in_place(&mut data))
                    .unwrap();
                let total = (1..=groups.len()).sum::<usize>() as f32;
                assert!(data.chunks(4).all(|element| element == total.to_le_bytes()));
            });
        }
    });
}

#[test]
fn ranks_with_different_numbers_of_streams_agree_on_the_smaller_one() {
    sum(&world_with(3, |config| {
        config.transport = TransportChoice::Tcp;
        config.streams_per_peer = [1, 2, 5][config.rank];
    }));
}

#[test]
fn an_invalid_number_of_streams_is_refused_before_any_connection() {
    for streams in [0, 65] {
        let config = Config { streams_per_peer: streams, ..Config::new(0, 1) };
        let error = Bootstrap::bind(config).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument(text) if text.contains("between 1 and 64")), "{error}");
    }
}

#[test]
fn an_algorithm_is_found_by_its_name() {
    assert!(Algorithm::ALL.into_iter().all(|algorithm| Algorithm::named(algorithm.name()) == Some(algorithm)));
    assert_eq!(Algorithm::named("Ring"), None);
}

#[test]
fn every_configured_algorithm_sums_correctly() {
    for algorithm in Algorithm::ALL {
        sum(&world_with(3, |config| {
            config.transport = TransportChoice::Tcp;
            config.algorithm = algorithm;
        }));
    }
}

#[test]
fn ranks_with_different_algorithms_fail_with_a_mismatch_that_names_both() {
    let outcomes = try_world(2, |config| {
        config.algorithm = [Algorithm::Auto, Algorithm::Ring][config.rank];
    });
    for outcome in outcomes {
        let error = outcome.map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::Mismatch(text) if text.contains("ring") && text.contains("auto")), "{error}");
    }
}
