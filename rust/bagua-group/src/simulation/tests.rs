//! The short form of the benchmark.

use super::*;

#[test]
fn tmp() {
    for ranks in [64, 256, 1024] {
        for scenario in Scenario::ALL {
            let at = std::time::Instant::now();
            let report = run(scenario, ranks, 1);
            eprintln!("{:?} {:#?}", at.elapsed(), report);
        }
    }
}
