//! Recovery of the averaging thread when its group fails. It continues in a smaller group, rejoins a job that continued
//! without this rank, or joins a part of the job that it was cut off from.

use std::time::{Duration, Instant};

use super::super::averaging_group::Peers;
use super::super::join_running_job::Refused;
use super::{Elastic, Rounds, allocate_arena_buffers};
use crate::error::{Error, Result, Source};
use crate::group::{JoinRequest, JoinServer};
use crate::health::LEFT;

/// How long a rank that was left behind looks for the others before it continues alone.
const ALONE: Duration = Duration::from_secs(10);

/// Pause between two searches for a part of the job that was cut off.
const LOOK: Duration = Duration::from_secs(1);

/// How long a search waits for the answer of a join server, which takes three round trips. Every fourth search waits
/// longer, for slow lines. No round starts meanwhile.
const GLANCE: Duration = Duration::from_millis(500);
const LONG_GLANCE: Duration = Duration::from_secs(2);

const PAUSE: Duration = Duration::from_millis(100);

impl Rounds {
    /// Continues in a smaller group after a rank left or, in an elastic job, was lost. Other failures end it.
    pub(super) fn recover(&mut self, error: Error) -> Result<()> {
        let mut error = error;
        loop {
            let goes_on = match &error {
                Error::PeerLost { reason, .. } => reason == LEFT || self.settings.elastic.is_some(),
                _ => false,
            };
            if !goes_on || self.shared.lock().stopping {
                return Err(error);
            }
            let Some(peers) = self.peers.take() else { return Err(error) };
            let own = peers.world_ranks[peers.group.rank()];
            let others: Vec<usize> = peers.world_ranks.iter().copied().filter(|rank| *rank != own).collect();
            let named = peers.named(error);
            let peers = match peers.shrink() {
                Ok((peers, lost)) => {
                    self.note_lost(&lost, &named, "it was lost together with another rank");
                    peers
                }
                Err(Error::Aborted(_)) => return Err(named),
                Err(Error::PeerLost { .. }) if self.settings.elastic.is_some() => {
                    self.note_lost(&others, &named, "it went on without this rank");
                    self.rejoin(own, &named)?
                }
                Err(error) => return Err(error),
            };
            match self.enter(peers) {
                Ok(()) => return Ok(()),
                Err(next) => error = next,
            }
        }
    }

    /// Notes that these ranks are lost. The reason is that of `cause` if it names the rank, or else `otherwise`.
    fn note_lost(&self, lost: &[usize], cause: &Error, otherwise: &str) {
        let mut control = self.shared.lock();
        for rank in lost {
            let reason = match cause {
                Error::PeerLost { rank: first, reason, .. } if first == rank => reason.clone(),
                _ => otherwise.to_owned(),
            };
            control.stats.lost.insert(*rank, reason);
        }
    }

    /// Continues the averaging in another group.
    pub(super) fn enter(&mut self, peers: Peers) -> Result<()> {
        let going = self.shared.replace_group(peers.group.clone());
        let arena_buffers = allocate_arena_buffers(&peers, self.parts.iter().map(|part| &part.weights), &self.settings);
        {
            let mut control = self.shared.lock();
            control.stats.lost.retain(|rank, _| !peers.world_ranks.contains(rank));
        }
        self.peers = Some(peers);
        self.looks = 0;
        if !going {
            return Err(Error::Aborted("the averaging of this model has ended".to_owned()));
        }
        for (part, room) in self.parts.iter_mut().zip(arena_buffers?) {
            let bytes = part.snapshot.len();
            let mut former = std::mem::replace(&mut part.average, room);
            // The average of an open round may still be written.
            part.average.bytes()[..bytes].copy_from_slice(&former.bytes()[..bytes]);
        }
        Ok(())
    }

    /// Rejoins a job that continues without this rank. This rank is alone if no other one is left.
    fn rejoin(&self, own: usize, cause: &Error) -> Result<Peers> {
        let Some(Elastic { server, digest }) = &self.settings.elastic else { return Err(cause.clone()) };
        // A rank that looks for the job cannot admit others.
        server.refuse_joins(&self.settings.name);
        let found = self.find_job(server, *digest, own, cause)?;
        server.accept_joins(&self.settings.name, *digest);
        Ok(found)
    }

    /// Joins the job through the server of any other rank.
    ///
    /// After a partition or a thaw, all remaining ranks may have left their groups to look for each other. Then no rank
    /// is in the job, and the lowest rank starts the job again.
    fn find_job(&self, server: &JoinServer, digest: [u8; 32], own: usize, cause: &Error) -> Result<Peers> {
        let start = Instant::now();
        let mut attempt = 0;
        loop {
            let mut looking = Vec::new();
            let mut found = false;
            for (host, at) in server.servers().into_iter().filter(|(rank, _)| *rank != own) {
                if self.shared.lock().stopping {
                    return Err(cause.clone());
                }
                match server.status(host, at, patience(attempt)) {
                    Ok(status) if status.in_job && !status.models.contains(&self.settings.name) => {
                        looking.push(host);
                        continue;
                    }
                    Ok(_) => found = true,
                    Err(_) => continue,
                }
                let request =
                    JoinRequest { model: self.settings.name.clone(), digest, server: server.address(), returns: true };
                match Peers::join(server, host, request) {
                    Ok(peers) => {
                        self.shared.lock().stats.joined += 1;
                        return Ok(peers);
                    }
                    Err(Refused::Now(_)) => {}
                    Err(Refused::ForEver(reason)) => return Err(lost(own, reason)),
                }
            }
            let begins = !found && looking.first().is_some_and(|lowest| own < *lowest);
            if begins || start.elapsed() > ALONE {
                let group = server.bind(self.view + 1, 0, 1, &self.settings.name)?;
                let address = group.address().to_vec();
                return Peers::new(group.connect(&[address])?, vec![own]);
            }
            attempt += 1;
            std::thread::sleep(PAUSE);
        }
    }

    /// Looks from time to time for a part of the job that has a lower rank and that this part was cut off from. If it
    /// is found, this rank leaves its part and joins that one.
    pub(super) fn meet(&mut self) -> Result<()> {
        let Some(Elastic { server, .. }) = &self.settings.elastic else { return Ok(()) };
        let patience = patience(self.looks);
        if self.looked.elapsed() < LOOK.max(2 * patience) {
            return Ok(());
        }
        let Some(peers) = &self.peers else { return Ok(()) };
        let (lowest, own) = (peers.world_ranks[0], peers.world_ranks[peers.group.rank()]);
        let away: Vec<usize> = self.shared.lock().stats.lost.keys().copied().filter(|rank| *rank < lowest).collect();
        // Asks one rank after the other, because ranks that died do not answer.
        let Some(sought) = away.get(self.looks as usize % away.len().max(1)) else { return Ok(()) };
        let at = server.servers().into_iter().find(|(known, _)| known == sought);
        let found = at.and_then(|(rank, at)| server.status(rank, at, patience).ok());
        self.looked = Instant::now();
        if !found.is_some_and(|status| status.models.contains(&self.settings.name)) {
            self.looks = self.looks.saturating_add(1);
            return Ok(());
        }
        if let Some(peers) = self.peers.take() {
            peers.group.leave();
        }
        let peers = self.rejoin(own, &lost(own, "its part of the job was cut off".to_owned()))?;
        self.enter(peers)
    }
}

/// Returns how long to wait for the answer of a join server after this number of attempts.
fn patience(attempt: u32) -> Duration {
    if attempt % 4 == 3 { LONG_GLANCE } else { GLANCE }
}

fn lost(own: usize, reason: String) -> Error {
    let (host, progress, source) = (String::new(), None, Source::default());
    Error::PeerLost { rank: own, host, reason, noticed_by: own, progress, source }
}
