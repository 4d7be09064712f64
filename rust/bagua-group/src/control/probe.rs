//! Asks ranks that are not connected whether they run, while a group is being connected.
//!
//! A rank listens before it publishes its address. So if nothing listens there any more it has ended, or has given up;
//! and if it answers nothing for the heartbeat timeout, it is frozen or cut off. A rank that is still connecting to
//! others answers, by its control thread.

use std::sync::Arc;

use tokio::net::TcpStream;

use super::super::connection::ControlConn;
use super::super::handshake::{self, Failed, Purpose, Refusal};
use super::super::plane::{beat, no_heartbeat};
use super::dial::Dial;
use super::shared::Plane;
use crate::platform::is_stopped;
use crate::wait::lock;

/// The most ranks that are asked at a time.
const AT_A_TIME: usize = 8;

/// The result of a probe.
enum Verdict {
    /// The rank runs, or the next probe will show more.
    Runs,
    /// The rank is lost: why, and true if its process is known to have ended.
    Lost(String, bool),
}

/// Asks the ranks that are not connected, the lowest first, if none has connected for the time between two heartbeats.
pub(in super::super) async fn ask_missing(plane: Arc<Plane>) {
    let period = beat(plane.config.heartbeat_timeout);
    let (mut seen, mut first) = (usize::MAX, 0);
    while !plane.has_left() {
        tokio::time::sleep(period).await;
        let missing = plane.unlinked();
        if plane.complete().is_some() {
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
            if let (Ok(Verdict::Lost(reason, ended)), Some(handle)) = (probe.await, plane.handle.get()) {
                // A refused connection may be why the rank gave up.
                let refusal = lock(&plane.connecting).refusal();
                handle.lost(rank, reason + &refusal, ended);
            }
        }
    }
}

/// Asks one rank.
async fn probe(plane: Arc<Plane>, rank: usize) -> Verdict {
    let limit = plane.config.heartbeat_timeout;
    let Ok(answer) = tokio::time::timeout(limit, ask(&plane, rank)).await else {
        let runs_here = plane.process(rank).is_some_and(|process| !is_stopped(process));
        return if runs_here { Verdict::Runs } else { Verdict::Lost(no_heartbeat(limit), false) };
    };
    match answer {
        Err(why) if why.no_listener() => {
            Verdict::Lost(format!("its process died or gave up before it was connected ({why})"), true)
        }
        Err(Failed::Refused(why)) if why != Refusal::Busy => {
            Verdict::Lost(format!("another process listens at its address ({why})"), true)
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
