//! Whether the ranks that are not connected run, asked while a group is being connected.
//!
//! A rank listens before it publishes its address. So if nothing listens there any more it has ended, or has given up; and if it answers
//! nothing for the heartbeat timeout, it is frozen or cut off. A rank that is still connecting to others answers, by its control thread.

use std::sync::Arc;
use std::time::Instant;

use tokio::net::TcpStream;

use super::super::connection::ControlConn;
use super::super::handshake::{self, Failed, Purpose, Refusal};
use super::dial::Dial;
use super::plane::{Loss, Plane, no_heartbeat};
use super::session;
use super::thread::Control;
use crate::error::Source;
use crate::wait::lock;

/// The most ranks that are asked at a time.
const AT_A_TIME: usize = 8;

/// What a probe shows.
pub(super) enum Verdict {
    /// It runs, or the next probe will show more.
    Runs,
    Lost(String, Source, Loss),
}

impl Control {
    /// Starts sending heartbeats, detecting silent peers and, until `deadline`, asking the peers that are not connected whether they run.
    /// Called once, when the world is known.
    pub(in super::super) fn watch(&self, deadline: Instant) {
        self.spawn(session::heartbeat(Arc::clone(&self.plane)));
        self.spawn(run(Arc::clone(&self.plane), deadline));
    }
}

/// Asks the ranks that are not connected, the lowest first, whenever none has connected for the time between two heartbeats.
async fn run(plane: Arc<Plane>, deadline: Instant) {
    let (mut seen, mut first) = (usize::MAX, 0);
    while Instant::now() < deadline && !plane.has_left() {
        tokio::time::sleep(session::period(&plane)).await;
        let missing = plane.awaited();
        if missing.is_empty() {
            return;
        }
        if std::mem::replace(&mut seen, missing.len()) != missing.len() {
            continue;
        }
        let asked: Vec<usize> = missing.iter().copied().filter(|rank| *rank >= first).take(AT_A_TIME).collect();
        first = asked.last().map_or(0, |last| last + 1);
        let probes: Vec<_> =
            asked.into_iter().map(|rank| (rank, tokio::spawn(probe(Arc::clone(&plane), rank)))).collect();
        for (rank, probe) in probes {
            if let Ok(Verdict::Lost(reason, source, loss)) = probe.await {
                // It may have given up because of that.
                let refusal = lock(&plane.connecting).refusal();
                plane.peer_lost(rank, &(reason + &refusal), &source, loss);
            }
        }
    }
}

/// Asks one rank.
pub(super) async fn probe(plane: Arc<Plane>, rank: usize) -> Verdict {
    let limit = plane.config.heartbeat_timeout;
    let Ok(answer) = tokio::time::timeout(limit, ask(&plane, rank)).await else {
        return if plane.runs_here(rank) {
            Verdict::Runs
        } else {
            Verdict::Lost(no_heartbeat(limit), Source::default(), Loss::Silent)
        };
    };
    match answer {
        Err(why) if why.no_listener() => {
            let text = format!("its process died or gave up before it was connected ({why})");
            Verdict::Lost(text, why.source(), Loss::Ended)
        }
        Err(Failed::Refused(why)) if why != Refusal::Busy => {
            Verdict::Lost(format!("another process listens at its address ({why})"), Source::default(), Loss::Ended)
        }
        // A table that is full, a line that broke, and TLS on one side only, which the rank that connects reports.
        Ok(()) | Err(Failed::Refused(_) | Failed::Broken { .. } | Failed::Tls(_)) => Verdict::Runs,
    }
}

async fn ask(plane: &Plane, rank: usize) -> Result<(), Failed> {
    let broken = |e: crate::error::Error| Failed::broken(e.to_string());
    let world = plane.world().map_err(broken)?;
    let dial = Dial { to: rank, purpose: Purpose::Probe, group: world.id, channel: 0, index: 0 };
    let hello = plane.hello(&dial).map_err(broken)?;
    let Some(tcp) = world.addresses[rank].tcp else { return Err(Failed::broken("it has no TCP address")) };
    let mut conn = ControlConn::connect(TcpStream::connect(tcp).await?, plane.tls.as_ref()).await?;
    handshake::probe(&mut conn.socket, &hello).await
}
