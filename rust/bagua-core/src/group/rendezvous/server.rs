//! Rank 0's end of the rendezvous: who is there, who is missing, and telling everybody.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener as Listening};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::handshake::{self, Hello, Key, Purpose, Refusal};
use super::super::let_many_wait;
use super::super::wire::{FRAME_LIMIT, Garbled, Reader, Writer, read_frame};
use super::tree::{self, Absent, Heard, STAY, STRANGERS};
use super::{PAUSE, check_all, key, runtime};
use crate::error::{Error, Result};
use crate::wait::lock;

/// The longest registration: an address, and a place.
const REGISTRATION_LIMIT: usize = FRAME_LIMIT + 128;

/// Rank 0's end of a rendezvous, on a port that listens from the start: whoever is told of it can connect.
#[derive(Debug)]
pub struct RendezvousServer {
    listener: Listening,
    /// For error texts.
    name: String,
}

impl RendezvousServer {
    /// Listens at `at`; port 0 takes any free one. [`RendezvousServer::place`] is to be told to the other ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is none to connect to, `System` when there is nothing to listen on.
    pub fn bind(at: SocketAddr) -> Result<RendezvousServer> {
        if at.ip().is_unspecified() {
            return Err(Error::InvalidArgument(format!(
                "listening on {} gives other ranks no address to connect to",
                at.ip()
            )));
        }
        let failed = |e| Error::system(&format!("listening on {at} for the rendezvous"), e);
        let listener = Listening::bind(at).map_err(failed)?;
        let name = listener.local_addr().map_err(failed)?.to_string();
        RendezvousServer::on(listener, name)
    }

    pub(super) fn on(listener: Listening, name: String) -> Result<RendezvousServer> {
        let failed = |e| Error::system(&format!("listening on {name} for the rendezvous"), e);
        let_many_wait(&listener).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(RendezvousServer { listener, name })
    }

    /// Where the other ranks find it.
    ///
    /// # Errors
    /// `System` when the socket does not say.
    pub fn place(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::system("the address of the rendezvous", e))
    }

    /// Spreads the addresses of all ranks; `address` is rank 0's.
    ///
    /// # Errors
    /// As [`rendezvous_tcp`] on rank 0.
    pub fn serve(self, world_size: usize, address: &[u8], secret: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        check_all(0, world_size, address)?;
        runtime()?.block_on(serve(self, world_size, address, key(secret), timeout))
    }
}

/// What a rank tells the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Registration {
    /// What is to be spread.
    pub(super) address: Vec<u8>,
    /// Where its children may fetch the list; without it, they get it from the server.
    pub(super) relay: Option<SocketAddr>,
}

impl Registration {
    /// The frame, length included.
    pub(super) fn frame(&self) -> Vec<u8> {
        let mut out = Writer::default();
        tree::framed(out.text(&self.relay.map(|relay| relay.to_string()).unwrap_or_default()).bytes(&self.address))
    }

    pub(super) fn parse(body: &[u8]) -> std::result::Result<Registration, Garbled> {
        let mut from = Reader(body);
        let relay = match from.text()? {
            none if none.is_empty() => None,
            some => Some(tree::place(&some)?),
        };
        let address = from.bytes()?.to_vec();
        from.end()?;
        Ok(Registration { address, relay })
    }
}

/// How far a rank has come.
enum RankState {
    /// It has proven itself, but not told its address yet.
    Proven,
    Registered(Registration),
    /// Its time was over before all were there. Another process may take its place.
    GaveUp,
}

/// Who is there.
#[derive(Default)]
struct Present {
    ranks: BTreeMap<usize, RankState>,
    /// How many are registered: whether all are is asked at every arrival.
    registered: usize,
}

impl Present {
    /// False when somebody else is this rank.
    fn claim(&mut self, rank: usize) -> bool {
        let free = matches!(self.ranks.get(&rank), None | Some(RankState::GaveUp));
        if free {
            self.ranks.insert(rank, RankState::Proven);
        }
        free
    }

    fn register(&mut self, rank: usize, registration: Registration) {
        self.put(rank, Some(RankState::Registered(registration)));
    }

    fn put(&mut self, rank: usize, visit: Option<RankState>) {
        self.registered += usize::from(matches!(visit, Some(RankState::Registered(_))));
        let before = match visit {
            Some(visit) => self.ranks.insert(rank, visit),
            None => self.ranks.remove(&rank),
        };
        self.registered -= usize::from(matches!(before, Some(RankState::Registered(_))));
    }

    /// Those that the others wait for: who gave up was there, and counts only when nobody else is missing.
    fn missing(&self, world_size: usize) -> Vec<usize> {
        let those = |gave_up: bool| {
            let is_one = |rank: &usize| match self.ranks.get(rank) {
                None | Some(RankState::Proven) => !gave_up,
                Some(RankState::Registered(_)) => false,
                Some(RankState::GaveUp) => gave_up,
            };
            (0..world_size).filter(is_one).collect::<Vec<_>>()
        };
        let absent = those(false);
        if absent.is_empty() { those(true) } else { absent }
    }
}

/// How it ended, for all who wait.
enum Outcome {
    /// The list, and where ranks with children hand it on.
    Complete { list: Vec<u8>, relays: HashMap<usize, SocketAddr> },
    /// Some did not come.
    Missing(Vec<u8>),
}

impl Outcome {
    async fn tell(&self, rank: usize, stream: &mut TcpStream) -> io::Result<()> {
        match self {
            Outcome::Complete { list, relays } => match relays.get(&tree::parent(rank)) {
                Some(relay) => stream.write_all(&tree::direction(*relay)).await?,
                None => stream.write_all(list).await?,
            },
            Outcome::Missing(frame) => stream.write_all(frame).await?,
        }
        stream.shutdown().await
    }
}

/// What the server knows.
struct State {
    world_size: usize,
    key: Key,
    present: Mutex<Present>,
    /// By rank: why a process that said to be it was refused, last.
    refused: Mutex<BTreeMap<usize, &'static str>>,
    changed: Notify,
}

impl State {
    fn is_complete(&self) -> bool {
        lock(&self.present).registered == self.world_size
    }

    fn missing(&self) -> Vec<usize> {
        lock(&self.present).missing(self.world_size)
    }

    /// A rank's time is over: whom it waited for, or `None` when all are there after all.
    fn give_up(&self, rank: usize) -> Option<Absent> {
        let mut present = lock(&self.present);
        if present.registered == self.world_size {
            return None;
        }
        let missing = present.missing(self.world_size);
        present.put(rank, Some(RankState::GaveUp));
        Some(Absent::new(missing))
    }

    /// What is known of missing ranks, for an error text.
    fn notes(&self, missing: &[usize]) -> String {
        let (present, refused) = (lock(&self.present), lock(&self.refused));
        let note = |rank: &usize| match (present.ranks.get(rank), refused.get(rank)) {
            (Some(RankState::GaveUp), _) => Some(format!("; rank {rank} was there and gave up")),
            (_, Some(why)) => Some(format!("; a process that says it is rank {rank} was refused: {why}")),
            _ => None,
        };
        missing.iter().filter_map(note).collect()
    }

    /// All addresses, and the relays.
    fn all(&self) -> (Vec<Vec<u8>>, HashMap<usize, SocketAddr>) {
        let present = lock(&self.present);
        let ranks = || {
            present.ranks.iter().filter_map(|(rank, visit)| match visit {
                RankState::Registered(registration) => Some((*rank, registration)),
                RankState::Proven | RankState::GaveUp => None,
            })
        };
        let relays = ranks().filter_map(|(rank, registration)| Some((rank, registration.relay?)));
        (ranks().map(|(_, registration)| registration.address.clone()).collect(), relays.collect())
    }
}

async fn serve(
    server: RendezvousServer,
    world_size: usize,
    address: &[u8],
    key: Key,
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let deadline = Instant::now() + timeout;
    let RendezvousServer { listener, name } = server;
    let listener = TcpListener::from_std(listener).map_err(|e| Error::system("starting the rendezvous", e))?;
    let mut present = Present::default();
    present.register(0, Registration { address: address.to_vec(), relay: None });
    let (present, changed) = (Mutex::new(present), Notify::new());
    let desk = Arc::new(State { world_size, key, present, refused: Mutex::default(), changed });
    let (publish, published) = watch::channel(None::<Arc<Outcome>>);
    let mut visitors = JoinSet::new();
    let gather = async {
        loop {
            let changed = desk.changed.notified();
            if desk.is_complete() {
                return;
            }
            tokio::select! {
                () = changed => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) if visitors.len() < world_size + STRANGERS => {
                        _ = visitors.spawn(attend(Arc::clone(&desk), stream, published.clone()));
                    }
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(PAUSE).await,
                },
                Some(_) = visitors.join_next() => {}
            }
        }
    };
    let complete = timeout_at(deadline, gather).await.is_ok();
    let (news, outcome) = if complete {
        let (all, relays) = desk.all();
        (Outcome::Complete { list: tree::list(&all), relays }, Ok(all))
    } else {
        let missing = desk.missing();
        let what = format!("the rendezvous at {name}{}", desk.notes(&missing));
        let absent = Absent::new(missing);
        (Outcome::Missing(absent.frame()), Err(absent.late(timeout, 0, what)))
    };
    publish.send_replace(Some(Arc::new(news)));
    drop(publish);
    // Strangers end too: what they wait for has been published. A rank that does not read does not hold up the others.
    let told = async { while visitors.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(STAY, told).await;
    outcome
}

/// One connection at the desk.
async fn attend(desk: Arc<State>, mut stream: TcpStream, mut published: watch::Receiver<Option<Arc<Outcome>>>) {
    let rank = match receive(&desk, &mut stream).await {
        Ok(rank) => rank,
        Err(why) => return handshake::refuse(&mut stream, why).await,
    };
    let news = match tree::news(&mut stream, &mut published).await {
        Heard::Outcome(news) => Some(news),
        Heard::Question => match desk.give_up(rank) {
            Some(absent) => {
                // One that does not wait for the answer either has all the more given up.
                let _ = stream.write_all(&absent.frame()).await;
                let _ = stream.shutdown().await;
                return;
            }
            // What has just become complete is about to be published.
            None => published.wait_for(Option::is_some).await.ok().and_then(|news| news.clone()),
        },
        Heard::End => None,
    };
    match news {
        // One that is gone by now is missed by others.
        Some(news) => _ = news.tell(rank, &mut stream).await,
        // The rank is gone: another process may take its place.
        None => lock(&desk.present).put(rank, None),
    }
}

async fn receive(desk: &State, stream: &mut TcpStream) -> std::result::Result<usize, Refusal> {
    let greeted = handshake::greet(stream).await?;
    let Hello { world_size, from, to, purpose, .. } = greeted.hello;
    if purpose != Purpose::Rendezvous {
        return Err(Refusal::Purpose);
    }
    // Who it is has not been proven: this is for people only, and no more than one conn per rank.
    let note = |why| {
        if from < desk.world_size {
            lock(&desk.refused).insert(from, why);
        }
    };
    if let Err(why) = handshake::prove(stream, &greeted, &desk.key).await {
        // Whoever has another secret hangs up when it sees this rank's proof.
        note("it does not have this rank's secret");
        return Err(why);
    }
    if world_size != desk.world_size {
        note("it was told of another number of ranks");
        return Err(Refusal::WorldSize);
    }
    if to != 0 || from == 0 || from >= world_size {
        return Err(Refusal::Rank);
    }
    if !lock(&desk.present).claim(from) {
        return Err(Refusal::Duplicate);
    }
    let told = async {
        handshake::welcome(stream).await?;
        read_frame(stream, REGISTRATION_LIMIT).await
    };
    let told = tokio::time::timeout(handshake::STEP, told).await;
    let Some(registration) = told.ok().and_then(|body| Registration::parse(&body.ok()?).ok()) else {
        lock(&desk.present).put(from, None);
        return Err(Refusal::Stranger);
    };
    lock(&desk.present).register(from, registration);
    desk.changed.notify_one();
    Ok(from)
}
