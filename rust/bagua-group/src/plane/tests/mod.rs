//! Many ranks in one process on a paused clock: every scenario with every fault.

mod net;

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::message::Notice;
use super::rank::Answer;
use crate::error::Error;
use crate::wait::lock;
use net::{HEARTBEAT, Net, Random, Runner};

/// Longer than a rank may need to find a silent one: the timeout, and the time between two looks.
const FOUND: Duration = Duration::from_secs(13);

/// A world of ranks that runs.
struct World {
    net: std::sync::Arc<Net>,
    ranks: Vec<Runner>,
    random: Random,
}

impl World {
    /// Starts the ranks, at most 8 on a host.
    fn start(size: usize, seed: u64) -> World {
        let net = Net::new(seed);
        let hosts: Vec<usize> = (0..size).map(|rank| rank / 16).collect();
        let ranks = (0..size).map(|rank| net.start(rank, &hosts)).collect();
        World { net, ranks, random: Random(seed ^ 0x5eed) }
    }

    /// Starts the ranks, and waits until all are connected.
    async fn joined(size: usize, seed: u64) -> World {
        let world = World::start(size, seed);
        world.until("all ranks are connected", Duration::from_secs(1), |world| {
            world.ranks.iter().all(|rank| rank.handle.status(|status| status.complete.is_some()))
        })
        .await;
        world
    }

    async fn until(&self, what: &str, limit: Duration, is_so: impl Fn(&World) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < limit, "{what}: not after {limit:?}");
            sleep(Duration::from_micros(500)).await;
        }
    }

    fn cut_both(&self, a: usize, b: usize) {
        self.net.cut(a, b);
        self.net.cut(b, a);
    }
}

#[tokio::test(start_paused = true)]
async fn all_ranks_join_and_stay_for_an_hour_of_heartbeats() {
    for size in [1, 2, 3, 8, 64] {
        let world = World::joined(size, 1).await;
        sleep(Duration::from_secs(3600)).await;
        for rank in &world.ranks {
            assert_eq!(rank.lost(), []);
        }
    }
}
