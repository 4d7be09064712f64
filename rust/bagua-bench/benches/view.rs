//! Time from the death of a rank until all other ranks have the next view, and the cost of the agreement, by number of
//! ranks.
//!
//! The ranks are threads of this process, each with a control thread, as in a process of its own. The rank that dies is
//! a process, which is killed by SIGKILL. The other ranks wait until they detect the death, and call `Group::shrink`,
//! which opens a lane of the new group. All ranks are on one host: control connections use loopback, lanes use shared
//! memory. Messages and bytes are those of the agreement on the old group's control connections. Processor time is that
//! of the whole process from the kill to the last rank's return. This includes connections and handshakes of the new
//! group up to that moment, but not leaving the old group, which follows.
//!
//! `cargo bench --bench view -- [--ranks N ...] [--runs N] [--json]`

#[path = "../../bagua-group/tests/group_world/mod.rs"]
mod group_world;

use std::time::{Duration, Instant};

use bagua_core::group::{Group, Options, Quorum, View};
use group_world::{cause, mixed, run_commands};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};

const HEARTBEAT: Duration = Duration::from_secs(10);

/// Cost of one death.
struct Figures {
    /// Seconds until the last rank detected the death.
    detected: f64,
    /// Seconds until the first and the last rank had the new view.
    first: f64,
    last: f64,
    /// Messages and bytes of the agreement, summed over the ranks that send them.
    messages: u64,
    bytes: u64,
    /// Seconds of processor time.
    cpu: f64,
}

fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Waits until a rank is lost, and shrinks the group.
fn survive(group: &Group, since: Instant) -> (f64, f64, View<bagua_core::group::Lane>) {
    let lost = cause(group);
    let detected = since.elapsed().as_secs_f64();
    let view = group.shrink(None, Quorum::Any, Group::lane, |lane| lane.barrier(&Options::DEFAULT));
    let view = view.unwrap_or_else(|error| panic!("{error}, after {lost}"));
    (detected, since.elapsed().as_secs_f64(), view)
}

/// Kills the last of `ranks` ranks, and returns the cost.
fn measure(ranks: usize) -> Figures {
    let (groups, processes) = mixed("victim", ranks, &[ranks - 1], HEARTBEAT);
    let (before, since) = (cpu(), Instant::now());
    let survivors: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups.iter().map(|group| scope.spawn(move || survive(group, since))).collect();
        processes[0].signal(Signal::KILL);
        threads.into_iter().map(|thread| thread.join().expect("a rank has the new view")).collect()
    });
    let cpu = cpu() - before;
    for (_, _, view) in &survivors {
        assert_eq!((view.ranks.len(), view.lost.as_slice()), (ranks - 1, &[ranks - 1][..]));
    }
    let of = |pick: fn(&(f64, f64, View<_>)) -> f64| survivors.iter().map(pick).collect::<Vec<f64>>();
    let most = |values: Vec<f64>| values.into_iter().fold(0.0, f64::max);
    Figures {
        detected: most(of(|one| one.0)),
        first: of(|one| one.1).into_iter().fold(f64::MAX, f64::min),
        last: most(of(|one| one.1)),
        messages: survivors.iter().map(|one| one.2.messages).sum(),
        bytes: survivors.iter().map(|one| one.2.bytes).sum(),
        cpu,
    }
}

fn median(figures: &[Figures], pick: fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = figures.iter().map(pick).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[expect(clippy::disallowed_methods, reason = "the benchmark that started this process says so that it is a rank")]
fn main() {
    if bagua_bench::listed("view") {
        return;
    }
    if std::env::var_os("GROUP_TEST_RANK").is_some() {
        return run_commands();
    }
    let (mut sizes, mut runs, mut json) = (Vec::new(), 5, false);
    let mut arguments = std::env::args().skip(1).peekable();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--ranks" => {
                while let Some(size) = arguments.next_if(|word| !word.starts_with("--")) {
                    sizes.push(size.parse().expect("a number of ranks"));
                }
            }
            "--runs" => runs = arguments.next().and_then(|word| word.parse().ok()).expect("a number of runs"),
            "--json" => json = true,
            // Cargo adds this argument.
            "--bench" => {}
            other => panic!("unknown option {other:?}"),
        }
    }
    if sizes.is_empty() {
        sizes = vec![2, 8, 64];
    }
    if !json {
        println!(
            "{:>6} {:>10} {:>14} {:>13} {:>9} {:>9} {:>9}",
            "ranks", "detect ms", "first view ms", "last view ms", "messages", "bytes", "CPU ms"
        );
    }
    for size in sizes {
        let all: Vec<Figures> = (0..runs).map(|_| measure(size)).collect();
        let [detected, first, last, cpu] = [
            median(&all, |one| one.detected),
            median(&all, |one| one.first),
            median(&all, |one| one.last),
            median(&all, |one| one.cpu),
        ];
        let (messages, bytes) = (median(&all, |one| one.messages as f64), median(&all, |one| one.bytes as f64));
        if json {
            println!(
                "{{\"ranks\": {size}, \"runs\": {runs}, \"detected_s\": {detected}, \"first_s\": {first}, \"last_s\": {last}, \
                 \"messages\": {messages}, \"bytes\": {bytes}, \"cpu_s\": {cpu}}}"
            );
        } else {
            let [detected, first, last, cpu] = [detected, first, last, cpu].map(|seconds| seconds * 1e3);
            println!("{size:>6} {detected:>10.1} {first:>14.1} {last:>13.1} {messages:>9} {bytes:>9} {cpu:>9.1}");
        }
    }
}
