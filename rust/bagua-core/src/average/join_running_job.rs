//! A process joins the averaging of a running job: the part of the ranks, and the part of the joining rank.
//!
//! Each view of the membership has its own group. The ranks exchange the addresses of the next view over the present
//! group, and over the joining rank's connection to one of them. The next view is used only if all ranks could open it.
//! Otherwise the present group continues.

use std::time::Duration;

use super::averaging_group::{Peers, lanes_that_carry};
use crate::error::{Error, Result};
use crate::group::address::{SLOT, put, take};
use crate::group::{Bootstrap, Group, JoinConnection, JoinMessage, JoinRequest, JoinServer, Lanes, Options};
use crate::request::{Io, Verb};
use crate::types::DType;

/// How long a joining rank and a member of the job wait for each other's answers.
const ANSWER: Duration = Duration::from_secs(5);

/// How long a joining rank waits for the next round. The ranks train meanwhile, and start a round every interval.
const PATIENCE: Duration = Duration::from_secs(60);

/// A joining rank whose connection this rank holds.
pub(super) struct Joiner {
    pub(super) request: JoinRequest,
    pub(super) conn: JoinConnection,
}

impl Joiner {
    /// Tells the joining rank why it cannot join.
    pub(super) fn refuse(mut self, for_ever: bool, text: String) {
        // Fails if the joining rank has already ended.
        let _ = self.conn.send(&JoinMessage::Refused { for_ever, text });
    }

    /// Makes the joining rank bind an address, and returns the address.
    fn bind(&mut self, view: u64, place: usize, ranks: &[usize]) -> Result<Vec<u8>> {
        self.conn.send(&JoinMessage::Bind { view, place, ranks: ranks.to_vec() })?;
        match self.conn.receive(ANSWER)? {
            JoinMessage::Address(address) => Ok(address),
            other => Err(Error::other(format!("a joining rank sent {other:?} instead of its address"))),
        }
    }
}

/// Opens lanes in a new group. All its ranks must pass a barrier.
fn open(bootstrap: Bootstrap, addresses: &[Vec<u8>]) -> Result<(Group, Lanes)> {
    let group = bootstrap.connect(addresses)?;
    let mut lanes = lanes_that_carry(&group)?;
    lanes.global.barrier(&Options { label: "view", ..Options::DEFAULT })?;
    Ok((group, lanes))
}

impl Peers {
    /// Admits rank `joiner` of the job. `held` is the joiner's connection, on the member that has it. Returns `None` if
    /// the rank did not join and this group continues. Collective.
    pub(super) fn admit(
        &mut self,
        joiner: usize,
        mut held: Option<Joiner>,
        view: u64,
        server: &JoinServer,
    ) -> Result<Option<Peers>> {
        let mut ranks = self.world_ranks.clone();
        let Err(place) = ranks.binary_search(&joiner) else {
            if let Some(held) = held {
                held.refuse(true, format!("rank {joiner} already takes part"));
            }
            return Ok(None);
        };
        ranks.insert(place, joiner);
        let own = ranks.binary_search(&self.world_ranks[self.group.rank()]).unwrap_or_default();
        let bound = server.bind(view, own, ranks.len(), self.group.name());
        let mut offer = vec![0; 2 * SLOT];
        let (mine, theirs) = offer.split_at_mut(SLOT);
        if let Ok(bootstrap) = &bound {
            put(mine, bootstrap.address());
        }
        if let Some(held) = &mut held
            && let Ok(address) = held.bind(view, place, &ranks)
        {
            put(theirs, &address);
        }
        let mut all = vec![0; offer.len() * self.group.size()];
        self.gather(&offer, &mut all, "addresses")?;
        let mut addresses: Vec<Option<Vec<u8>>> = all.chunks(2 * SLOT).map(|pair| take(&pair[..SLOT])).collect();
        let joining = all.chunks(2 * SLOT).find_map(|pair| take(&pair[SLOT..]));
        addresses.insert(place, joining);
        let addresses: Option<Vec<Vec<u8>>> = addresses.into_iter().collect();
        let opened = match (bound, addresses) {
            (Ok(bootstrap), Some(addresses)) => {
                let sent = match &mut held {
                    Some(held) => held.conn.send(&JoinMessage::Addresses(addresses.clone())),
                    None => Ok(()),
                };
                sent.and_then(|()| open(bootstrap, &addresses))
            }
            (Err(error), _) => Err(error),
            (Ok(_), None) => Err(Error::other("a rank did not send its address")),
        };
        let mut all = vec![0; self.group.size()];
        self.gather(&[u8::from(opened.is_ok())], &mut all, "view")?;
        let everybody = all.iter().all(|one| *one == 1);
        match opened {
            Ok((group, lanes)) if everybody => {
                if let Some(held) = &mut held {
                    // The joining rank is already a member. If it does not get this message, it leaves.
                    let _ = held.conn.send(&JoinMessage::Joined);
                }
                let mut peers = Peers::over(group, lanes, ranks);
                peers.take_bytes(self);
                Ok(Some(peers))
            }
            _ => {
                if let Some(held) = held {
                    held.refuse(false, "not all ranks could open the next view".to_owned());
                }
                Ok(None)
            }
        }
    }

    fn gather(&mut self, own: &[u8], all: &mut [u8], label: &str) -> Result<()> {
        let options = Options { label, ..Options::DEFAULT };
        self.lane().run(&options, DType::U8, Verb::AllGather, Io::split(own, all))
    }

    /// Joins the group of rank `host` through that rank's server.
    ///
    /// # Errors
    /// The reason, and if another attempt or another server may succeed.
    pub(super) fn join(server: &JoinServer, host: usize, request: JoinRequest) -> std::result::Result<Peers, Refused> {
        let again = |error: Error| Refused::Now(error.to_string());
        let Some((_, at)) = server.servers().into_iter().find(|(rank, _)| *rank == host) else {
            return Err(Refused::Now(format!("the join server of rank {host} is not known")));
        };
        let model = request.model.clone();
        let mut conn = server.connect(host, at, ANSWER).map_err(again)?;
        conn.send(&JoinMessage::Join(request)).map_err(again)?;
        let (view, place, ranks) = match conn.receive(PATIENCE).map_err(again)? {
            JoinMessage::Bind { view, place, ranks } => (view, place, ranks),
            other => return Err(Refused::by(other)),
        };
        let bootstrap = server.bind(view, place, ranks.len(), &model).map_err(again)?;
        conn.send(&JoinMessage::Address(bootstrap.address().to_vec())).map_err(again)?;
        let addresses = match conn.receive(ANSWER * 2).map_err(again)? {
            JoinMessage::Addresses(addresses) => addresses,
            other => return Err(Refused::by(other)),
        };
        let (group, lanes) = open(bootstrap, &addresses).map_err(again)?;
        match conn.receive(ANSWER * 2).map_err(again)? {
            JoinMessage::Joined => Ok(Peers::over(group, lanes, ranks)),
            other => Err(Refused::by(other)),
        }
    }
}

/// The reason why a rank did not join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Another server, or a later attempt, may succeed.
    Now(String),
    /// No attempt will succeed.
    ForEver(String),
}

impl Refused {
    fn by(message: JoinMessage) -> Refused {
        match message {
            JoinMessage::Refused { for_ever: true, text } => Refused::ForEver(text),
            JoinMessage::Refused { for_ever: false, text } => Refused::Now(text),
            other => Refused::Now(format!("an unexpected {other:?}")),
        }
    }
}
