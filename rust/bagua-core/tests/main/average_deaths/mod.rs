//! A rank dies, or a connection breaks, at every step of a round of averaging. No survivor is torn, the sum is kept,
//! and a new process of the dead rank joins.
//!
//! The ranks are processes with a collective that follows a script. The collective either builds every verb from single
//! messages, which it sends one after another, and counts a step before and after each message; or it runs the verbs of
//! shared memory or TCP, and counts a step before and after each verb. At the step in the script, the process kills
//! itself, or reports that the connection to a peer broke.

mod script;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crate::group_world::{Process, config, hex, unhex, until};
use bagua_core::average::{Averager, Elastic, Model, Settings};
use bagua_core::group::{Bootstrap, Config, JoinServer, TransportChoice};
use bagua_core::memory::{WeightLock, Weights};
use bagua_core::types::DType;
use bagua_core::wait::{Deadline, Waited};
use rustix::process::Signal;
use script::{Factory, Fate, How, Script, ScriptLine};

const ENTRY: &str = "average_deaths::entry_of_processes";

const HEARTBEAT: Duration = Duration::from_secs(5);

const INTERVAL: Duration = Duration::from_millis(2);

const LONG: Duration = Duration::from_secs(30);

/// Weight of a joining rank before it joins, which must not count.
const OF_JOINER: f64 = -7000.0;

/// Returns the initial weight of a rank.
fn initial(rank: usize) -> f64 {
    10f64.powi(rank as i32)
}

#[expect(clippy::disallowed_methods, reason = "the test that started this process says its rank so")]
fn number(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

fn numbers<T: FromStr<Err: Debug>>(text: &str) -> Vec<T> {
    text.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// The averaging of one process.
struct Rank {
    averager: Averager,
    lock: Arc<WeightLock>,
    weights: *mut f64,
    script: Arc<Script>,
}

impl Rank {
    const COUNT: usize = 100;

    /// Joins or begins the job, as the first lines of the input say.
    fn start(lines: &mut impl Iterator<Item = String>) -> Rank {
        let (rank, size) = (number("GROUP_TEST_RANK"), number("GROUP_TEST_SIZE"));
        let part = ScriptLine::parse(&lines.next().unwrap());
        let (rounds, steps, first_round) = Default::default();
        let script = Arc::new(Script { part, goes: AtomicBool::new(part.joins), rounds, steps, first_round });
        let mut config: Config = config(rank, size);
        config.heartbeat_timeout = Duration::from_millis(number("GROUP_TEST_HEARTBEAT_MS") as u64);
        config.factories = vec![Arc::new(Factory(Arc::clone(&script)))];
        if part.how != How::Shm {
            config.transport = TransportChoice::Tcp;
        }
        let server = Arc::new(JoinServer::open(config.clone(), b"token").unwrap());
        println!("\nSERVER {}", server.address());
        let bootstrap = (!part.joins).then(|| Bootstrap::bind(config).unwrap());
        println!("\nADDRESS {}", hex(bootstrap.as_ref().map_or(b"", |bootstrap| bootstrap.address())));
        let servers: Vec<SocketAddr> = numbers(&lines.next().unwrap());
        servers.iter().enumerate().for_each(|(other, at)| server.note_server(other, *at));
        server.enter_job();
        let addresses: Vec<Vec<u8>> = lines.next().unwrap().split(' ').map(unhex).collect();

        let lock = WeightLock::new();
        let first = if part.joins { OF_JOINER } else { initial(rank) };
        let weights = vec![first; Rank::COUNT].leak().as_mut_ptr();
        // SAFETY: leaked, and used under the lock only.
        let memory = unsafe { Weights::new(weights.cast(), Rank::COUNT, DType::F64, Arc::clone(&lock)) }.unwrap();
        let model = Model { weights: vec![memory], buffers: vec![] };
        let elastic = Some(Elastic { server, digest: [3; 32] });
        let settings =
            Settings { name: "model".to_owned(), interval: INTERVAL, codec: None, elastic, takes_part: true };
        let averager = match bootstrap {
            Some(bootstrap) => {
                let group = bootstrap.connect(&addresses).unwrap();
                let mut lane = group.lane().unwrap();
                let averager = Averager::start(&group, &mut lane, model, settings).unwrap();
                std::mem::forget((group, lane));
                averager
            }
            None => {
                let averager = Averager::join(model, settings, &Deadline::after(LONG)).unwrap();
                assert_eq!(averager.wait_joined(LONG), Waited::Done(Ok(())));
                averager
            }
        };
        println!("\nCONNECTED");
        if !part.joins {
            assert_eq!(lines.next().as_deref(), Some("go"));
            script.goes.store(true, SeqCst);
        }
        Rank { averager, lock, weights, script }
    }

    fn with<T>(&self, work: impl FnOnce(&mut [f64]) -> T) -> T {
        let _guard = self.lock.lock(1);
        // SAFETY: leaked, and used under the lock only.
        work(unsafe { std::slice::from_raw_parts_mut(self.weights, Rank::COUNT) })
    }

    /// The weights after a whole round of these ranks that began after this call, in one view.
    fn settle(&self, ranks: &[usize]) -> f64 {
        let mut since = None;
        until(&format!("two rounds of {ranks:?}"), || {
            self.averager.check().unwrap();
            let stats = self.averager.stats();
            let (view, rounds) = *since.get_or_insert((stats.view, stats.rounds));
            if stats.ranks != ranks || stats.view != view {
                since = None;
            }
            stats.rounds >= rounds + 2 && since.is_some()
        });
        self.with(|weights| {
            assert!(weights.iter().all(|weight| *weight == weights[0]), "torn: {weights:?}");
            weights[0]
        })
    }
}

#[test]
#[ignore = "the other tests start processes that run this"]
fn entry_of_processes() {
    let mut lines = std::io::stdin().lines().map(|line| line.unwrap());
    let rank = Rank::start(&mut lines);
    for line in lines {
        match line.split_once(' ').unwrap() {
            ("settle", ranks) => println!("\nVALUE {}", rank.settle(&numbers(ranks))),
            ("add", what) => {
                let what: f64 = what.parse().unwrap();
                rank.with(|weights| weights.iter_mut().for_each(|weight| *weight += what));
                println!("\nADDED");
            }
            ("lost", ranks) => {
                let expected = numbers(ranks);
                until("these ranks are lost", || {
                    rank.averager.stats().lost.into_keys().collect::<Vec<usize>>() == expected
                });
                println!("\nLOST");
            }
            ("steps", _) => println!("\nSTEPS {}", rank.script.first_round.load(SeqCst)),
            other => panic!("unknown command {other:?}"),
        }
    }
}

/// A job of processes.
struct Job {
    how: How,
    /// Processes by rank; `None` for a dead rank.
    ranks: Vec<Option<Process>>,
    /// Addresses of the join servers, by rank.
    servers: Vec<String>,
}

impl Job {
    /// Starts a job with these fates: each a rank, a step of the rank, and the event at that step.
    fn start(how: How, size: usize, fates: &[(usize, usize, Fate)]) -> Job {
        Job::start_beating(HEARTBEAT, how, size, fates)
    }

    /// Starts a job as [`Job::start`] does, with this heartbeat timeout.
    fn start_beating(heartbeat: Duration, how: How, size: usize, fates: &[(usize, usize, Fate)]) -> Job {
        let mut ranks: Vec<Process> = (0..size).map(|rank| Process::start(ENTRY, rank, size, heartbeat)).collect();
        for (rank, process) in ranks.iter_mut().enumerate() {
            let fate = fates.iter().find(|(who, ..)| *who == rank).map(|(_, step, fate)| (*step, *fate));
            process.write(&ScriptLine { how, fate, joins: false }.line());
        }
        let servers: Vec<String> = ranks.iter_mut().map(|process| process.read_after("SERVER ")).collect();
        let addresses: Vec<Vec<u8>> = ranks.iter_mut().map(Process::address).collect();
        for process in &mut ranks {
            process.write(&servers.join(" "));
            process.connect(&addresses);
        }
        for process in &mut ranks {
            process.read_after("CONNECTED");
        }
        for process in &mut ranks {
            process.write("go");
        }
        Job { how, ranks: ranks.into_iter().map(Some).collect(), servers }
    }

    /// Returns the living ranks.
    fn living(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| self.ranks[*rank].is_some()).collect()
    }

    fn each<T>(&mut self, mut act: impl FnMut(usize, &mut Process) -> T) -> Vec<T> {
        self.ranks.iter_mut().enumerate().filter_map(|(rank, process)| Some(act(rank, process.as_mut()?))).collect()
    }

    /// Runs a round of all living ranks, and returns the value that all of them have afterwards.
    #[track_caller]
    fn settle(&mut self, script: &str) -> f64 {
        let ranks = self.living();
        self.settle_among(&ranks, script)
    }

    /// Runs a round of these ranks, and returns the value that all of them have afterwards.
    #[track_caller]
    fn settle_among(&mut self, ranks: &[usize], script: &str) -> f64 {
        let values = self.ask(ranks, &format!("settle {}", words(ranks)), "VALUE ");
        let values: Vec<f64> = values.iter().map(|value| value.parse().unwrap()).collect();
        assert!(values.iter().all(|value| *value == values[0]), "{script}: {values:?}");
        values[0]
    }

    /// Sends a command to these ranks, and returns their answers: the text after `word`.
    fn ask(&mut self, ranks: &[usize], command: &str, word: &str) -> Vec<String> {
        let is_asked = |rank| ranks.contains(&rank);
        self.each(|rank, process| is_asked(rank).then(|| process.write(command)));
        self.each(|rank, process| is_asked(rank).then(|| process.read_after(word))).into_iter().flatten().collect()
    }

    fn signal(&mut self, ranks: &[usize], signal: Signal) {
        self.each(|rank, process| ranks.contains(&rank).then(|| process.signal(signal)));
    }

    /// Lets every rank add its own number while rounds run, and checks that the average is over the living ranks.
    #[track_caller]
    fn check_divisor(&mut self, before: f64, script: &str) -> f64 {
        let ranks = self.living();
        let added = |rank: usize| 3.0 * (rank as f64 + 1.0);
        self.each(|rank, process| process.write(&format!("add {}", added(rank))));
        self.each(|_, process| process.read_after("ADDED"));
        let expected = before + ranks.iter().map(|rank| added(*rank)).sum::<f64>() / ranks.len() as f64;
        let found = self.settle(script);
        assert!(is_near(found, expected), "{script}: {found} instead of {expected} after progress of {ranks:?}");
        found
    }

    /// Waits for the end of a rank that the script kills.
    #[track_caller]
    fn dies(&mut self, rank: usize, script: &str) {
        let process = self.ranks[rank].take().unwrap();
        assert_eq!(process.killed_by(), Some(libc::SIGKILL), "{script}");
    }

    /// Starts a new process for a dead rank.
    fn comes_back(&mut self, rank: usize) {
        let mut process = Process::start(ENTRY, rank, self.ranks.len(), HEARTBEAT);
        process.write(&ScriptLine { how: self.how, fate: None, joins: true }.line());
        self.servers[rank] = process.read_after("SERVER ");
        process.write(&self.servers.join(" "));
        process.connect(&[]);
        process.read_after("CONNECTED");
        self.ranks[rank] = Some(process);
    }
}

fn words(ranks: &[usize]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * b.abs()
}

fn average_of(ranks: impl IntoIterator<Item = usize>) -> f64 {
    let values: Vec<f64> = ranks.into_iter().map(initial).collect();
    values.iter().sum::<f64>() / values.len() as f64
}

/// Steps of a rank from the beginning of the first round to that of the second.
fn steps_of_a_round(how: How, size: usize) -> usize {
    let mut job = Job::start(how, size, &[]);
    assert!(is_near(job.settle("no rank dies"), average_of(0..size)));
    let steps = job.each(|_, process| {
        process.write("steps of the first round");
        process.read_after("STEPS ").parse::<usize>().unwrap()
    });
    assert!(steps.iter().all(|count| *count == steps[0]), "{steps:?}");
    let verb = if how == How::Messages { size + 1 } else { 2 };
    assert_eq!(steps[0], 3 * verb, "statuses, average, agreement");
    steps[0]
}

/// Runs a job in which a rank dies at a step. Returns true if the round was written.
fn a_death(how: How, size: usize, step: usize, who: usize) -> bool {
    let script = format!("{how:?}, {size} ranks, rank {who} dies at step {step}");
    let mut job = Job::start(how, size, &[(who, step, Fate::Dies)]);
    job.dies(who, &script);
    let (with, without) = (average_of(0..size), average_of(job.living()));
    let found = job.settle(&script);
    let written = is_near(found, with);
    assert!(written || is_near(found, without), "{script}: {found}, neither {with} nor {without}: torn");
    let found = job.check_divisor(found, &script);
    job.comes_back(who);
    let again = job.settle(&script);
    assert!(is_near(again, found), "{script}: {again} instead of {found} after it came back");
    job.check_divisor(again, &script);
    written
}

/// Lets every rank die at every step of a round, and at the first step of the next round. Checks that both outcomes
/// occur.
fn deaths(how: How, size: usize) {
    let mut outcomes = BTreeSet::new();
    for step in 0..=steps_of_a_round(how, size) {
        for who in 0..size {
            let written = a_death(how, size, step, who);
            outcomes.insert(written);
            assert!(!written || step > 0, "nothing was sent");
        }
    }
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
}

#[test]
fn a_death_at_any_message_of_a_round_of_two_leaves_a_survivor_that_goes_on() {
    deaths(How::Messages, 2);
}

#[test]
fn a_death_at_any_message_of_a_round_of_three_tears_no_survivor() {
    deaths(How::Messages, 3);
}

#[test]
fn a_death_before_or_after_any_verb_of_shared_memory_tears_no_survivor() {
    for size in 2..=4 {
        deaths(How::Shm, size);
    }
}

#[test]
fn a_death_before_or_after_any_verb_over_tcp_tears_no_survivor() {
    for size in 2..=4 {
        deaths(How::Tcp, size);
    }
}

/// If a connection breaks, one rank calls the other lost. That rank leaves, comes back, and counts with the weights
/// that it has. No other rank is torn.
#[test]
fn a_line_that_breaks_at_any_step_of_a_round_costs_no_rank_for_long_and_tears_none_of_the_others() {
    for size in 2..=4 {
        let round = steps_of_a_round(How::Messages, size);
        for step in 0..=round {
            // One rank for each step: all ranks do the same.
            let who = step % size;
            let script = format!("{size} ranks, a line of rank {who} breaks at step {step}");
            let mut job = Job::start(How::Messages, size, &[(who, step, Fate::Breaks)]);
            let found = job.settle(&script);
            let all = average_of(0..size);
            // All ranks or none wrote the round, or all except a rank that was called lost, or only that rank. Which
            // rank is called lost depends on which one detected the broken connection first.
            let without = (0..size).map(|lost| all + (initial(lost) - all) / size as f64);
            let apart = without.flat_map(|without| [without, 2.0 * all - without]);
            let possible: Vec<f64> = if step < 2 * round / 3 { vec![all] } else { apart.chain([all]).collect() };
            assert!(possible.iter().any(|value| is_near(found, *value)), "{script}: {found}, none of {possible:?}");
            job.check_divisor(found, &script);
        }
    }
}

#[test]
fn a_second_death_while_the_others_find_out_about_the_first_tears_no_survivor() {
    for size in [3, 4] {
        let round = steps_of_a_round(How::Messages, size);
        // The deaths fall into the agreement of the round, in which some ranks may know more than other ranks.
        for first in round - size - 1..=round {
            for second in first..first + 2 * size + 4 {
                let (one, other) = (first % size, (first + 1 + second % (size - 1)) % size);
                let script = format!("{size} ranks, rank {one} dies at step {first}, rank {other} at step {second}");
                let fates = [(one, first, Fate::Dies), (other, second, Fate::Dies)];
                let mut job = Job::start(How::Messages, size, &fates);
                job.dies(one, &script);
                job.dies(other, &script);
                let left = job.living();
                let and = |rank: usize| average_of(left.iter().copied().chain([rank]));
                let possible = [average_of(0..size), and(one), and(other), average_of(left.clone())];
                let found = job.settle(&script);
                assert!(possible.iter().any(|value| is_near(found, *value)), "{script}: {found}, none of {possible:?}");
                job.check_divisor(found, &script);
            }
        }
    }
}

#[test]
fn to_a_rank_without_which_the_others_went_on_all_of_them_are_lost_until_it_is_back() {
    let script = "rank 2 freezes";
    let mut job = Job::start_beating(Duration::from_secs(1), How::Tcp, 3, &[]);
    job.settle(script);
    job.signal(&[2], Signal::STOP);
    job.settle_among(&[0, 1], script);
    job.ask(&[0, 1], "lost 2", "LOST");
    // Ranks 0 and 1 do not answer when rank 2 looks for them.
    job.signal(&[0, 1], Signal::STOP);
    job.signal(&[2], Signal::CONT);
    job.ask(&[2], "lost 0 1", "LOST");
    job.signal(&[0, 1], Signal::CONT);
    job.settle(script);
    job.ask(&[0, 1, 2], "lost ", "LOST");
}
