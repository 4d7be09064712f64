//! A small server on rank 0 that everybody tells an address, and that then tells everybody all of them, the greater part by way
//! of others.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::handshake::{self, Failed, Hello, Key, Purpose, Refusal};
use super::super::lock;
use super::super::wire::{FRAME_LIMIT, Garbled, Reader, Writer, read_frame};
use super::tree::{self, Absent, Answer, Relay, STAY, STRANGERS};
use super::{check, late};
use crate::error::{Error, Result};

/// How much longer a rank waits to hear from rank 0 who is missing.
const GRACE: Duration = Duration::from_millis(500);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// The longest registration: an address, and a place.
const REGISTRATION_LIMIT: usize = FRAME_LIMIT + 128;

/// Spreads addresses through a small TCP server that rank 0 runs on `server` until everybody has everything.
///
/// # Errors
/// `Timeout` naming the missing ranks; `System` for a wrong secret or an address that cannot be used; `Mismatch` when world
/// sizes differ or two processes claim one rank (the second hears it); `Value` for a rank or port that makes no sense.
pub fn rendezvous_tcp(
    server: (&str, u16),
    rank: usize,
    world_size: usize,
    address: &[u8],
    secret: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    check(rank, world_size)?;
    if address.len() > FRAME_LIMIT {
        return Err(Error::Value(format!("an address of {} bytes", address.len())));
    }
    if world_size == 1 {
        return Ok(vec![address.to_vec()]);
    }
    if server.1 == 0 {
        return Err(Error::Value("port 0 is no place for other ranks to find".to_owned()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::system("starting the rendezvous", e))?;
    let key = Key::new(secret, b"rendezvous");
    let outcome = if rank == 0 {
        runtime.block_on(serve(server, world_size, address, key, timeout))
    } else {
        runtime.block_on(join(server, rank, world_size, address, key, timeout))
    };
    // A name that is still being looked up must not hold up a caller whose time is over.
    runtime.shutdown_background();
    outcome
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

/// Who is there.
#[derive(Default)]
struct Present {
    /// By rank; `None` while one has proven itself but not told its address yet.
    ranks: BTreeMap<usize, Option<Registration>>,
    /// How many of them have: whether all are there is asked at every arrival.
    registered: usize,
}

impl Present {
    /// False when somebody else is this rank.
    fn claim(&mut self, rank: usize) -> bool {
        let free = !self.ranks.contains_key(&rank);
        if free {
            self.ranks.insert(rank, None);
        }
        free
    }

    fn register(&mut self, rank: usize, registration: Registration) {
        if self.ranks.insert(rank, Some(registration)).flatten().is_none() {
            self.registered += 1;
        }
    }

    fn leave(&mut self, rank: usize) {
        if self.ranks.remove(&rank).flatten().is_some() {
            self.registered -= 1;
        }
    }
}

/// How it ended, for all who wait.
enum News {
    /// The list, and where ranks with children hand it on.
    Complete { list: Vec<u8>, relays: HashMap<usize, SocketAddr> },
    /// Some did not come.
    Missing(Vec<u8>),
}

impl News {
    async fn tell(&self, rank: usize, stream: &mut TcpStream) -> io::Result<()> {
        match self {
            News::Complete { list, relays } => match relays.get(&tree::parent(rank)) {
                Some(relay) => stream.write_all(&tree::direction(*relay)).await?,
                None => stream.write_all(list).await?,
            },
            News::Missing(frame) => stream.write_all(frame).await?,
        }
        stream.shutdown().await
    }
}

/// What the server knows.
struct Desk {
    world_size: usize,
    key: Key,
    present: Mutex<Present>,
    /// By rank: why a process that said to be it was refused, last.
    refused: Mutex<BTreeMap<usize, &'static str>>,
    changed: Notify,
}

impl Desk {
    fn is_complete(&self) -> bool {
        lock(&self.present).registered == self.world_size
    }

    fn missing(&self) -> Vec<usize> {
        let present = lock(&self.present);
        (0..self.world_size).filter(|rank| !present.ranks.get(rank).is_some_and(Option::is_some)).collect()
    }

    /// What is known of missing ranks, for an error text.
    fn refusals(&self, missing: &[usize]) -> String {
        let refused = lock(&self.refused);
        let known = missing.iter().filter_map(|rank| Some((rank, refused.get(rank)?)));
        known.map(|(rank, why)| format!("; a process that says it is rank {rank} was refused: {why}")).collect()
    }

    /// All addresses, and the relays.
    fn all(&self) -> (Vec<Vec<u8>>, HashMap<usize, SocketAddr>) {
        let present = lock(&self.present);
        let ranks = || present.ranks.iter().filter_map(|(rank, registration)| Some((*rank, registration.as_ref()?)));
        let relays = ranks().filter_map(|(rank, registration)| Some((rank, registration.relay?)));
        (ranks().map(|(_, registration)| registration.address.clone()).collect(), relays.collect())
    }
}

async fn serve(
    server: (&str, u16),
    world_size: usize,
    address: &[u8],
    key: Key,
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let deadline = Instant::now() + timeout;
    let (host, port) = server;
    let listener = match TcpListener::bind(server).await {
        // The name leads here by way of somebody else's address.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => TcpListener::bind(("0.0.0.0", port)).await,
        other => other,
    };
    let listener = listener.map_err(|e| Error::system(&format!("listening on {host}:{port} for the rendezvous"), e))?;
    let mut present = Present::default();
    present.register(0, Registration { address: address.to_vec(), relay: None });
    let (present, changed) = (Mutex::new(present), Notify::new());
    let desk = Arc::new(Desk { world_size, key, present, refused: Mutex::default(), changed });
    let (publish, published) = watch::channel(None::<Arc<News>>);
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
        (News::Complete { list: tree::list(&all), relays }, Ok(all))
    } else {
        let missing = desk.missing();
        let what = format!("the rendezvous at {host}:{port}{}", desk.refusals(&missing));
        let absent = Absent::new(missing);
        (News::Missing(absent.frame()), Err(absent.late(timeout, 0, what)))
    };
    publish.send_replace(Some(Arc::new(news)));
    drop(publish);
    // Strangers end too: what they wait for has been published. A rank that does not read does not hold up the others.
    let told = async { while visitors.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(STAY, told).await;
    outcome
}

/// One connection at the desk.
async fn attend(desk: Arc<Desk>, mut stream: TcpStream, mut published: watch::Receiver<Option<Arc<News>>>) {
    let rank = match receive(&desk, &mut stream).await {
        Ok(rank) => rank,
        Err(why) => return handshake::refuse(&mut stream, why).await,
    };
    match tree::news(&mut stream, &mut published).await {
        // One that is gone by now is missed by others.
        Some(news) => _ = news.tell(rank, &mut stream).await,
        // The rank is gone: another process may take its place.
        None => lock(&desk.present).leave(rank),
    }
}

async fn receive(desk: &Desk, stream: &mut TcpStream) -> std::result::Result<usize, Refusal> {
    let greeted = handshake::greet(stream).await?;
    let Hello { world_size, from, to, purpose, .. } = greeted.hello;
    if purpose != Purpose::Rendezvous {
        return Err(Refusal::Purpose);
    }
    // Who it is has not been proven: this is for people only, and no more than one line per rank.
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
        lock(&desk.present).leave(from);
        return Err(Refusal::Stranger);
    };
    lock(&desk.present).register(from, registration);
    desk.changed.notify_one();
    Ok(from)
}

async fn join(
    server: (&str, u16),
    rank: usize,
    world_size: usize,
    address: &[u8],
    key: Key,
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let (host, port) = server;
    let place = format!("the rendezvous at {host}:{port}");
    let hello = Hello {
        world_size,
        from: rank,
        to: 0,
        purpose: Purpose::Rendezvous,
        group: 0,
        channel: 0,
        index: 0,
        job: [0; 8],
    };
    let mut awaited = 0;
    let mut trouble = "no answer".to_owned();
    let attempts = async {
        let (answer, relay) = loop {
            match register(server, &hello, &key, address).await {
                Ok(heard) => break heard,
                Err(Failed::Refused(why)) => return Err(refused(why, rank, world_size, &place)),
                Err(Failed::Broken(how)) => trouble = how,
            }
            tokio::time::sleep(PAUSE).await;
        };
        let from = match answer {
            Answer::Complete(all) => return Ok((all, relay)),
            Answer::Missing(absent) => return Err(absent.late(timeout, rank, place.clone())),
            Answer::Fetch(from) => from,
        };
        awaited = tree::parent(rank);
        trouble = format!("rank {awaited} at {from}: no answer");
        loop {
            // Rank 0 let this rank in, so that whoever refuses it now is no rank of this job.
            match tree::fetch(from, &Hello { to: awaited, ..hello }, &key).await {
                Ok(all) => return Ok((all, relay)),
                Err(how) => trouble = format!("rank {awaited} at {from}: {how}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let (all, relay) = match timeout_at(Instant::now() + timeout + GRACE, attempts).await {
        Ok(outcome) => outcome?,
        Err(_) => return Err(late(timeout, vec![awaited], rank, format!("{place} ({trouble})"))),
    };
    if all.len() != world_size || all[rank] != address {
        return Err(Error::System(format!("{place} gave a list that does not fit")));
    }
    if let Some(relay) = relay {
        relay.hand_over(&all).await;
    }
    Ok(all)
}

/// The error for a rank that the server does not let in.
fn refused(why: Refusal, rank: usize, world_size: usize, place: &str) -> Error {
    match why {
        Refusal::WorldSize => Error::Mismatch(format!(
            "rank {rank} was told that there are {world_size} ranks, rank 0 was told otherwise ({place})"
        )),
        Refusal::Duplicate => Error::Mismatch(format!("two processes are rank {rank} ({place})")),
        Refusal::Version => Error::Mismatch(format!("{place}: {why}")),
        Refusal::Stranger | Refusal::Job | Refusal::Rank | Refusal::Secret | Refusal::Purpose | Refusal::Busy => {
            Error::System(format!("{place}: {why}"))
        }
    }
}

/// Tells the server an address, once, and hears how it ended. A rank with children listens for them from here on.
pub(super) async fn register(
    server: (&str, u16),
    hello: &Hello,
    key: &Key,
    address: &[u8],
) -> std::result::Result<(Answer, Option<Relay>), Failed> {
    let mut stream = TcpStream::connect(server).await?;
    handshake::introduce(&mut stream, hello, key).await?;
    let relay = Relay::open(&stream, hello, key).await;
    let registration = Registration { address: address.to_vec(), relay: relay.as_ref().map(|relay| relay.at) };
    stream.write_all(&registration.frame()).await?;
    Ok((Answer::read(&mut stream).await?, relay))
}
