//! The script of a process: what happens at which step of its rounds, and the collective that follows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use bagua_core::collective::{
    Collective, CollectiveFactory, HostIo, Incoming, Io, OpContext, Outgoing, Verb, over_exchange,
};
use bagua_core::error::Result;
use bagua_core::types::ReduceOp;

use super::INTERVAL;

/// The label of the exchange with which a round begins.
const STATUS: &str = "status";

/// Kind of collective that a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Verbs of single messages over TCP.
    Messages,
    /// The verbs of TCP.
    Tcp,
    /// The verbs of shared memory.
    Shm,
}

/// Event at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The process ends.
    Dies,
    /// The line to the next rank breaks.
    Breaks,
}

/// One process's part of a script, a line of its input.
#[derive(Clone, Copy, Debug)]
pub struct ScriptLine {
    pub how: How,
    /// The step, counted from the beginning of the first round, and what happens at it.
    pub fate: Option<(usize, Fate)>,
    /// The process joins later.
    pub joins: bool,
}

impl ScriptLine {
    pub fn line(self) -> String {
        let (step, fate) = self.fate.unwrap_or((usize::MAX, Fate::Dies));
        format!("{} {step} {} {}", self.how as u8, u8::from(fate == Fate::Breaks), u8::from(self.joins))
    }

    pub fn parse(line: &str) -> ScriptLine {
        let numbers: Vec<usize> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let how = [How::Messages, How::Tcp, How::Shm][numbers[0]];
        let fate = if numbers[2] == 1 { Fate::Breaks } else { Fate::Dies };
        ScriptLine { how, fate: (numbers[1] < usize::MAX).then_some((numbers[1], fate)), joins: numbers[3] == 1 }
    }
}

/// A process's part of the script, and its progress. The collectives of all its lanes share it.
#[derive(Debug)]
pub struct Script {
    pub part: ScriptLine,
    /// True if all ranks have started. No round begins before, so that no event of the script makes the start fail.
    pub goes: AtomicBool,
    /// Exchanges of statuses that have begun.
    pub rounds: AtomicUsize,
    /// Steps since the first round began.
    pub steps: AtomicUsize,
    /// Steps when the second round began.
    pub first_round: AtomicUsize,
}

impl Script {
    /// Counts a step of a round. At the step in the script, kills this process, or returns true if a connection breaks.
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
pub struct Factory(pub Arc<Script>);

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
        // Members of a new view exchange more data than an unread connection can hold.
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
