//! A process comes into the averaging of a running job: what the ranks do, and what the newcomer does.
//!
//! The next view of the membership is a group of its own. Its address exchange travels over the present group, and over the visit of the
//! newcomer at the door of one of its ranks. It is used only when all ranks have opened it; otherwise the present group goes on.

use std::time::Duration;

use super::peers::{Peers, lanes_that_carry};
use crate::error::{Error, Result};
use crate::group::address::{SLOT, put, take};
use crate::group::{Asked, Bootstrap, Door, DoorMessage, Group, Lanes, Options, Visit};
use crate::request::{Io, Verb};
use crate::types::DType;

/// How long one answer of the other side of a visit may take.
const ANSWER: Duration = Duration::from_secs(5);

/// How long a newcomer waits until a round begins: the ranks train, and begin one every interval.
const PATIENCE: Duration = Duration::from_secs(60);

/// A newcomer at this rank's door.
pub(super) struct Newcomer {
    pub(super) asked: Asked,
    pub(super) visit: Visit,
}

impl Newcomer {
    /// Says why it cannot come in.
    pub(super) fn refuse(mut self, for_ever: bool, text: String) {
        // It may have gone.
        let _ = self.visit.send(&DoorMessage::Refused { for_ever, text });
    }

    /// Has it bind, and returns its address.
    fn bind(&mut self, view: u64, place: usize, ranks: &[usize]) -> Result<Vec<u8>> {
        self.visit.send(&DoorMessage::Bind { view, place, ranks: ranks.to_vec() })?;
        match self.visit.receive(ANSWER)? {
            DoorMessage::Address(address) => Ok(address),
            other => Err(Error::other(format!("a newcomer says {other:?} instead of its address"))),
        }
    }
}

/// Opens lanes in a new group, with a barrier that every rank of it has to pass.
fn open(bootstrap: Bootstrap, addresses: &[Vec<u8>]) -> Result<(Group, Lanes)> {
    let group = bootstrap.connect(addresses)?;
    let mut lanes = lanes_that_carry(&group)?;
    lanes.global.barrier(&Options { label: "view", ..Options::DEFAULT })?;
    Ok((group, lanes))
}

impl Peers {
    /// Lets rank `joiner` of the job in; `host` is the rank of this group that has it at its door, as `newcomer`. `None`: it did not come
    /// in, and this group goes on. Collective.
    ///
    /// # Errors
    /// Those of this group.
    pub(super) fn admit(
        &mut self,
        joiner: usize,
        mut newcomer: Option<Newcomer>,
        view: u64,
        door: &Door,
    ) -> Result<Option<Peers>> {
        let mut ranks = self.world_ranks.clone();
        let Err(place) = ranks.binary_search(&joiner) else {
            if let Some(newcomer) = newcomer {
                newcomer.refuse(true, format!("rank {joiner} takes part already"));
            }
            return Ok(None);
        };
        ranks.insert(place, joiner);
        let own = ranks.binary_search(&self.world_ranks[self.group.rank()]).unwrap_or_default();
        let bound = door.bind(view, own, ranks.len(), self.group.name());
        let mut offer = vec![0; 2 * SLOT];
        let (mine, theirs) = offer.split_at_mut(SLOT);
        if let Ok(bootstrap) = &bound {
            put(mine, bootstrap.address());
        }
        if let Some(newcomer) = &mut newcomer
            && let Ok(address) = newcomer.bind(view, place, &ranks)
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
                let told = match &mut newcomer {
                    Some(newcomer) => newcomer.visit.send(&DoorMessage::Addresses(addresses.clone())),
                    None => Ok(()),
                };
                told.and_then(|()| open(bootstrap, &addresses))
            }
            (Err(error), _) => Err(error),
            (Ok(_), None) => Err(Error::other("an address is missing")),
        };
        let mut all = vec![0; self.group.size()];
        self.gather(&[u8::from(opened.is_ok())], &mut all, "view")?;
        let everybody = all.iter().all(|one| *one == 1);
        match opened {
            Ok((group, lanes)) if everybody => {
                if let Some(newcomer) = &mut newcomer {
                    // It is a member already; if it does not hear of it, it leaves.
                    let _ = newcomer.visit.send(&DoorMessage::Welcome);
                }
                let mut peers = Peers::over(group, lanes, ranks);
                peers.take_bytes(self);
                Ok(Some(peers))
            }
            _ => {
                if let Some(newcomer) = newcomer {
                    newcomer.refuse(false, "not all ranks could open the next view".to_owned());
                }
                Ok(None)
            }
        }
    }

    fn gather(&mut self, own: &[u8], all: &mut [u8], label: &str) -> Result<()> {
        let options = Options { label, ..Options::DEFAULT };
        self.lane().run(&options, DType::U8, Verb::AllGather, Io::split(own, all))
    }

    /// Visits the door of rank `host`, and comes into its group. For a newcomer.
    ///
    /// # Errors
    /// [`Refused`] where it may try another door or again; else what makes every attempt useless.
    pub(super) fn join(door: &Door, host: usize, asked: Asked) -> std::result::Result<Peers, Refused> {
        let again = |error: Error| Refused::Now(error.to_string());
        let Some((_, at)) = door.doors().into_iter().find(|(rank, _)| *rank == host) else {
            return Err(Refused::Now(format!("the door of rank {host} is not known")));
        };
        let model = asked.model.clone();
        let mut visit = door.visit(host, at, ANSWER).map_err(again)?;
        visit.send(&DoorMessage::Join(asked)).map_err(again)?;
        let (view, place, ranks) = match visit.receive(PATIENCE).map_err(again)? {
            DoorMessage::Bind { view, place, ranks } => (view, place, ranks),
            other => return Err(Refused::by(other)),
        };
        let bootstrap = door.bind(view, place, ranks.len(), &model).map_err(again)?;
        visit.send(&DoorMessage::Address(bootstrap.address().to_vec())).map_err(again)?;
        let addresses = match visit.receive(ANSWER * 2).map_err(again)? {
            DoorMessage::Addresses(addresses) => addresses,
            other => return Err(Refused::by(other)),
        };
        let (group, lanes) = open(bootstrap, &addresses).map_err(again)?;
        match visit.receive(ANSWER * 2).map_err(again)? {
            DoorMessage::Welcome => Ok(Peers::over(group, lanes, ranks)),
            other => Err(Refused::by(other)),
        }
    }
}

/// Why a newcomer did not come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Another door, or a later visit, may let it in.
    Now(String),
    /// None will.
    ForEver(String),
}

impl Refused {
    fn by(message: DoorMessage) -> Refused {
        match message {
            DoorMessage::Refused { for_ever: true, text } => Refused::ForEver(text),
            DoorMessage::Refused { for_ever: false, text } => Refused::Now(text),
            other => Refused::Now(format!("an unexpected {other:?}")),
        }
    }
}
