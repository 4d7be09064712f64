//! A rank dies, or a line breaks, at every step of a round of averaging: no survivor is torn, the sum is kept, and a process of the dead
//! rank comes back.
//!
//! The ranks are processes with a collective that follows a script. It makes every verb of single messages, sent one after another, and
//! counts a step before and after each; or it runs the verbs of shared memory or TCP, with a step before and after each. At the step of
//! the script the process kills itself, or reports that the line to a peer broke.

#[path = "../../bagua-group/tests/group_world/mod.rs"]
mod group_world;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bagua_core::average::{Averager, Elastic, Model, Settings};
use bagua_core::collective::{
    Collective, CollectiveFactory, HostIo, Incoming, Io, OpContext, Outgoing, Verb, over_exchange,
};
use bagua_core::error::Result;
use bagua_core::group::{Bootstrap, Config, JoinServer, TransportChoice};
use bagua_core::memory::{WeightLock, Weights};
use bagua_core::types::{DType, ReduceOp};
use bagua_core::wait::{Deadline, Waited};
use group_world::{Process, config, hex, unhex, until};

const ENTRY: &str = "entry_of_processes";

const HEARTBEAT: Duration = Duration::from_secs(5);

const INTERVAL: Duration = Duration::from_millis(2);

const LONG: Duration = Duration::from_secs(30);

/// The label of the exchange with which a round begins.
const STATUS: &str = "status";

/// What a joining rank has before it joins, which must not count.
const OF_JOINER: f64 = -7000.0;

/// What the collective of a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Verbs of single messages over TCP.
    Messages,
    /// The verbs of TCP.
    Tcp,
    /// The verbs of shared memory.
    Shm,
}

/// What happens at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The process ends.
    Dies,
    /// The line to the next rank breaks.
    Breaks,
}

/// One process's part of a script, a line of its input.
#[derive(Clone, Copy, Debug)]
struct ScriptLine {
    how: How,
    /// The step, counted from the beginning of the first round, and what happens at it.
    fate: Option<(usize, Fate)>,
    /// The process joins later.
    joins: bool,
}

impl ScriptLine {
    fn line(self) -> String {
        let (step, fate) = self.fate.unwrap_or((usize::MAX, Fate::Dies));
        format!("{} {step} {} {}", self.how as u8, u8::from(fate == Fate::Breaks), u8::from(self.joins))
    }

    fn parse(line: &str) -> ScriptLine {
        let numbers: Vec<usize> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let how = [How::Messages, How::Tcp, How::Shm][numbers[0]];
        let fate = if numbers[2] == 1 { Fate::Breaks } else { Fate::Dies };
        ScriptLine { how, fate: (numbers[1] < usize::MAX).then_some((numbers[1], fate)), joins: numbers[3] == 1 }
    }
}

/// The part of a process, and how far it is. Shared by the collectives of all its lanes.
#[derive(Debug)]
struct Script {
    part: ScriptLine,
    /// All ranks have started: what the script does is no failure of the start.
    goes: AtomicBool,
    /// Exchanges of statuses that have begun.
    rounds: AtomicUsize,
    /// Steps since the first round began.
    steps: AtomicUsize,
    /// Steps when the second round began.
    first_round: AtomicUsize,
}

impl Script {
    /// Counts a step of a round; at the step of the script this does not return, or returns that a line breaks.
    fn step(&self) -> bool {
        if self.rounds.load(SeqCst) == 0 {
            return false;
        }
        let step = self.steps.fetch_add(1, SeqCst);
        match self.part.fate {
            Some((at, Fate::Dies)) if at == step => {
                // SAFETY: ends this process as a kill from outside would: no destructor, no goodbye.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                loop {
                    std::thread::park();
                }
            }
            Some((at, Fate::Breaks)) => at == step,
            _ => false,
        }
    }

    fn begin(&self, label: &str) {
        while label == STATUS && !self.goes.load(SeqCst) {
            std::thread::sleep(INTERVAL);
        }
        if label == STATUS && self.rounds.fetch_add(1, SeqCst) == 1 {
            self.first_round.store(self.steps.load(SeqCst), SeqCst);
        }
    }
}

#[derive(Debug)]
struct Factory(Arc<Script>);

impl CollectiveFactory for Factory {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn wrap(&self, inner: Box<dyn Collective>, _hosts: &[Vec<usize>]) -> Box<dyn Collective> {
        Box::new(Scripted { inner, script: Arc::clone(&self.0) })
    }
}

struct Scripted {
    inner: Box<dyn Collective>,
    script: Arc<Script>,
}

impl Scripted {
    fn step(&self, cx: &OpContext<'_>, peer: usize) -> Result<()> {
        if self.script.step() {
            return Err(cx.health.fail(cx.health.peer_lost(peer, "the script breaks the line")));
        }
        Ok(())
    }

    /// Sends `own` to all ranks, one after another, and returns everybody's.
    fn all(&mut self, cx: &OpContext<'_>, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (rank, size) = (self.rank(), self.size());
        for peer in (1..size).map(|distance| (rank + distance) % size) {
            self.step(cx, peer)?;
            self.inner.exchange(cx, &[Outgoing::new(peer, cx.fingerprint, own)], &mut [])?;
        }
        self.step(cx, (rank + 1) % size)?;
        let mut all = vec![own.to_vec(); size];
        let of_others = all.iter_mut().enumerate().filter(|(peer, _)| *peer != rank);
        let mut incoming: Vec<_> = of_others.map(|(peer, data)| Incoming::new(peer, cx.fingerprint, data)).collect();
        self.inner.exchange(cx, &[], &mut incoming)?;
        drop(incoming);
        self.step(cx, (rank + 1) % size)?;
        Ok(all)
    }
}

impl Collective for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn transports(&self) -> Vec<&'static str> {
        self.inner.transports()
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        if verb.is_over_exchange() {
            return over_exchange(self, cx, verb, io);
        }
        self.script.begin(cx.label);
        if self.size() == 1 {
            return self.inner.run(cx, verb, io);
        }
        // The data between the members of a new view is more than a connection holds that no peer reads from.
        if self.script.part.how != How::Messages || matches!(verb, Verb::AllToAll) {
            let next = (self.rank() + 1) % self.size();
            self.step(cx, next)?;
            self.inner.run(cx, verb, io)?;
            return self.step(cx, next);
        }
        let mut io = io.into_host()?;
        let all = self.all(cx, io.input())?;
        match verb {
            Verb::AllGather => match &mut io {
                HostIo::Split { dst, .. } => dst.copy_from_slice(&all.concat()),
                HostIo::InPlace(_) => unreachable!("a round gathers into another buffer"),
            },
            Verb::AllReduce(ReduceOp::Avg) => io.output().copy_from_slice(&averaged(&all)),
            Verb::Broadcast { root } => io.output().copy_from_slice(&all[root]),
            Verb::Barrier => {}
            other => unreachable!("{other:?} is no part of a round"),
        }
        Ok(())
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        self.inner.exchange(cx, sends, recvs)
    }
}

/// The average of equally long vectors of f64, by element, in rank order.
fn averaged(all: &[Vec<u8>]) -> Vec<u8> {
    let mut sum = vec![0.0; all[0].len() / 8];
    for bytes in all {
        for (sum, one) in sum.iter_mut().zip(bytes.chunks_exact(8)) {
            *sum += f64::from_ne_bytes(*one.first_chunk().unwrap());
        }
    }
    sum.iter().flat_map(|sum| (sum / all.len() as f64).to_ne_bytes()).collect()
}

/// What a rank has at the beginning.
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
            ("steps", _) => println!("\nSTEPS {}", rank.script.first_round.load(SeqCst)),
            other => panic!("unknown command {other:?}"),
        }
    }
}

/// A job of processes.
struct Job {
    how: How,
    /// By rank; `None` for a dead one.
    ranks: Vec<Option<Process>>,
    /// By rank.
    servers: Vec<String>,
}

impl Job {
    /// Starts a job in which this happens at these steps of these ranks.
    fn start(how: How, size: usize, fates: &[(usize, usize, Fate)]) -> Job {
        let mut ranks: Vec<Process> = (0..size).map(|rank| Process::start(ENTRY, rank, size, HEARTBEAT)).collect();
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

    /// The ranks that live.
    fn living(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| self.ranks[*rank].is_some()).collect()
    }

    fn each<T>(&mut self, mut act: impl FnMut(usize, &mut Process) -> T) -> Vec<T> {
        self.ranks.iter_mut().enumerate().filter_map(|(rank, process)| Some(act(rank, process.as_mut()?))).collect()
    }

    /// What all living ranks have after a round of them.
    #[track_caller]
    fn settle(&mut self, script: &str) -> f64 {
        let ranks: Vec<String> = self.living().iter().map(ToString::to_string).collect();
        self.each(|_, process| process.write(&format!("settle {}", ranks.join(" "))));
        let values = self.each(|_, process| process.read_after("VALUE ").parse::<f64>().unwrap());
        assert!(values.iter().all(|value| *value == values[0]), "{script}: {values:?}");
        values[0]
    }

    /// Every rank adds something of its own while rounds go on: the divisor is the number of those that take part.
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

    /// A new process of a dead rank comes in.
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

/// A rank dies at a step. Returns whether the round was written.
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

/// Deaths of every rank at every step of a round, and at the first of the next one; both outcomes occur.
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
fn a_death_at_any_message_of_a_round_of_four_tears_no_survivor() {
    deaths(How::Messages, 4);
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

/// Over a line that breaks, one rank calls the other lost, which leaves, comes back, and counts with the weights that it has. The others are
/// not torn.
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
            // The round was written by all or none, by all but a rank that was called lost, or by that one only. Which of them the
            // others call lost depends on which rank detected the broken line first.
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
        // In the agreement of the round: there some may know more than others.
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
