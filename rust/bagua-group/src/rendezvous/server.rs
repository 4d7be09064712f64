//! The server of the rendezvous on rank 0: registrations, missing ranks, and sending the outcome to every rank.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::address::Address;
use super::super::admission::Admission;
use super::super::connection::{AsyncSocket, ControlConn};
use super::super::handshake::{self, Hello, Purpose, ReceivedHello, Refusal};
use super::super::listen::{Listener, listen};
use super::super::serve::{Accepted, Service, serve as serve_until};
use super::super::tls::{Access, Ends, Refused};
use super::super::wire::{Encoding, FRAME_LIMIT, bytes, read_frame, socket};
use super::common::{Limits, check_arguments, finish_sending, runtime};
use super::tree::{self, Answer, EXTRA_CONNECTIONS, Event, LINGER, MissingRanks, Proofs};
use crate::error::{Error, Result, Source};
use crate::wait::lock;

/// The longest registration: an address blob and a socket address.
const REGISTRATION_LIMIT: usize = FRAME_LIMIT + 128;

/// Rank 0's server of a rendezvous. It listens from its creation on, so that ranks that get its address can connect at once.
#[derive(Debug)]
pub struct RendezvousServer {
    pub(super) listener: TcpListener,
    /// Host and port, for error texts.
    pub(super) name: String,
}

/// The most ranks with a second process of which an error text says more than their number.
const NAMED_DUPLICATES: usize = 8;

impl RendezvousServer {
    /// Listens at `address`; port 0 takes any free port. The caller must publish [`RendezvousServer::address`] to the other ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for an unspecified IP address, `System` when the socket cannot be opened.
    pub fn bind(address: SocketAddr) -> Result<RendezvousServer> {
        if address.ip().is_unspecified() {
            return Err(Error::InvalidArgument(format!(
                "listening on {} gives other ranks no address to connect to",
                address.ip()
            )));
        }
        let failed = |e| Error::system(&format!("listening on {address} for the rendezvous"), e);
        let listener = listen(address).map_err(failed)?;
        let name = listener.local_addr().map_err(failed)?.to_string();
        Ok(RendezvousServer { listener, name })
    }

    /// The address that the other ranks connect to.
    ///
    /// # Errors
    /// `System` when the system call fails.
    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::system("the address of the rendezvous", e))
    }

    /// Exchanges the addresses of all ranks; `address` is rank 0's.
    ///
    /// # Errors
    /// As [`rendezvous_tcp`](super::rendezvous_tcp) on rank 0.
    pub fn serve<'a>(
        self,
        world_size: usize,
        address: &[u8],
        access: impl Into<Access<'a>>,
        limits: impl Into<Limits>,
    ) -> Result<Vec<Vec<u8>>> {
        check_arguments(0, world_size, address)?;
        let (proofs, limits, runtime) = (Proofs::of(&access.into())?, limits.into(), runtime()?);
        let deadline = Instant::now() + limits.timeout;
        let (result, sending) = runtime.block_on(serve(self, world_size, address, proofs, limits))?;
        if result.is_ok() {
            finish_sending(runtime, sending, deadline);
        }
        result
    }
}

/// A rank's registration with the server.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Registration {
    /// The address to exchange.
    #[serde(with = "bytes")]
    pub(in super::super) address: Vec<u8>,
    /// Where its children can fetch the list; without it, they get the list from the server.
    #[serde(with = "socket")]
    pub(in super::super) relay: Option<SocketAddr>,
}

impl Encoding for Registration {}

/// The progress of one rank.
enum RankState {
    /// Authenticated, not registered yet.
    Authenticated,
    Registered(Registration),
    /// Its deadline passed before all ranks had registered. Another process may register with this rank.
    TimedOut,
}

/// The ranks that have connected.
#[derive(Default)]
struct Ranks {
    states: BTreeMap<usize, RankState>,
    /// Number of registered ranks; checked at every registration.
    registered: usize,
}

impl Ranks {
    /// Reserves a rank for an authenticated process; false when another process has it.
    fn claim(&mut self, rank: usize) -> bool {
        let free = matches!(self.states.get(&rank), None | Some(RankState::TimedOut));
        if free {
            self.states.insert(rank, RankState::Authenticated);
        }
        free
    }

    /// The process that registered with a rank, for error texts; empty while that is not known.
    fn holder(&self, rank: usize) -> String {
        let Some(RankState::Registered(registration)) = self.states.get(&rank) else { return String::new() };
        // An address is checked where it is used.
        let address = Address::parse(&registration.address);
        address.map_or_else(|_| String::new(), |found| format!(" (process {} on {})", found.pid, found.host_name))
    }

    fn register(&mut self, rank: usize, registration: Registration) {
        self.set(rank, Some(RankState::Registered(registration)));
    }

    fn set(&mut self, rank: usize, state: Option<RankState>) {
        self.registered += usize::from(matches!(state, Some(RankState::Registered(_))));
        let before = match state {
            Some(state) => self.states.insert(rank, state),
            None => self.states.remove(&rank),
        };
        self.registered -= usize::from(matches!(before, Some(RankState::Registered(_))));
    }

    /// The ranks that the others wait for. Ranks that timed out had registered: they are missing only when no other rank is.
    fn missing(&self, world_size: usize) -> Vec<usize> {
        let ranks = |timed_out: bool| {
            let is_one = |rank: &usize| match self.states.get(rank) {
                None | Some(RankState::Authenticated) => !timed_out,
                Some(RankState::Registered(_)) => false,
                Some(RankState::TimedOut) => timed_out,
            };
            (0..world_size).filter(is_one).collect::<Vec<_>>()
        };
        let absent = ranks(false);
        if absent.is_empty() { ranks(true) } else { absent }
    }
}

/// The outcome of the exchange, which is sent to every registered rank.
enum Outcome {
    /// The frame of the list, and the addresses of the ranks that relay it to their children.
    Complete { list: Vec<u8>, relays: HashMap<usize, SocketAddr> },
    /// The frame of the missing ranks, or of the error with which the exchange ended.
    Ended(Vec<u8>),
}

impl Outcome {
    async fn send(&self, rank: usize, stream: &mut AsyncSocket) -> io::Result<()> {
        match self {
            Outcome::Complete { list, relays } => match relays.get(&tree::parent(rank)) {
                Some(relay) => stream.write_all(&Answer::Fetch(*relay).frame()).await?,
                None => stream.write_all(list).await?,
            },
            Outcome::Ended(frame) => stream.write_all(frame).await?,
        }
        stream.shutdown().await
    }
}

/// The ranks that have registered or were refused, shared by the connections of the server.
struct RegisteredRanks {
    world_size: usize,
    proofs: Proofs,
    ranks: Mutex<Ranks>,
    /// By rank: when the connection of a registered rank ended, and its host, until another process registers with it.
    ended: Mutex<BTreeMap<usize, (Instant, String)>>,
    /// By rank: why the last process with this rank was refused.
    refused: Mutex<BTreeMap<usize, &'static str>>,
    /// By rank: where the last process was that was refused because another one has its rank, until that one has ended and a third one joins.
    duplicates: Mutex<BTreeMap<usize, String>>,
    /// Why the last process was refused that did not get as far as to say its rank.
    stranger: Mutex<Option<String>>,
    /// Notified after every registration, and when the connection of a registered rank has ended.
    changed: Notify,
    /// What is sent to every registered rank, once it is known.
    outcome: watch::Sender<Option<Arc<Outcome>>>,
}

impl RegisteredRanks {
    fn is_complete(&self) -> bool {
        lock(&self.ranks).registered == self.world_size
    }

    fn missing(&self) -> MissingRanks {
        let ranks = lock(&self.ranks);
        let missing = ranks.missing(self.world_size);
        let details = self.details(&ranks, &missing);
        MissingRanks::new(missing, details)
    }

    /// Handles a rank whose deadline has passed: the ranks that are missing, or `None` when all have registered meanwhile.
    fn time_out(&self, rank: usize) -> Option<MissingRanks> {
        let mut ranks = lock(&self.ranks);
        if ranks.registered == self.world_size {
            return None;
        }
        let missing = ranks.missing(self.world_size);
        let details = self.details(&ranks, &missing);
        ranks.set(rank, Some(RankState::TimedOut));
        Some(MissingRanks::new(missing, details))
    }

    /// Notes that the connection of a registered rank has ended.
    fn end(&self, rank: usize) {
        let mut ranks = lock(&self.ranks);
        if let Some(RankState::Registered(registration)) = ranks.states.get(&rank) {
            // An address is checked where it is used.
            let host = Address::parse(&registration.address)
                .map_or_else(|_| String::new(), |address| address.host_name.to_string());
            lock(&self.ended).insert(rank, (Instant::now(), host));
        }
        ranks.set(rank, None);
        self.changed.notify_one();
    }

    /// The registered rank whose connection ended first, without another one since: when, and its host.
    fn first_ended(&self) -> Option<(usize, Instant, String)> {
        let ended = lock(&self.ended);
        let first = ended.iter().min_by_key(|(_, (at, _))| *at);
        first.map(|(rank, (at, host))| (*rank, *at, host.clone()))
    }

    /// Details on missing ranks, for the error text.
    fn details(&self, ranks: &Ranks, missing: &[usize]) -> String {
        let (refused, duplicates) = (lock(&self.refused), lock(&self.duplicates));
        let detail = |rank: &usize| match (ranks.states.get(rank), refused.get(rank)) {
            (Some(RankState::TimedOut), _) => Some(format!("; rank {rank} had registered and timed out")),
            (_, Some(why)) => Some(format!("; a process with rank {rank} was refused: {why}")),
            _ => None,
        };
        let stranger = lock(&self.stranger).as_ref().map(|why| format!("; a process was refused: {why}"));
        let duplicate = |(rank, host): (&usize, &String)| {
            let holder = ranks.holder(*rank);
            format!("; a process{host} was refused because another one{holder} had joined as rank {rank}")
        };
        let named = duplicates.iter().take(NAMED_DUPLICATES).map(duplicate);
        let others = duplicates.len().saturating_sub(NAMED_DUPLICATES);
        let others = (others > 0).then(|| format!("; and {others} more ranks had a second process"));
        named.chain(others).chain(missing.iter().filter_map(detail)).chain(stranger).collect()
    }

    /// All addresses, and the addresses of the relays.
    fn all(&self) -> (Vec<Vec<u8>>, HashMap<usize, SocketAddr>) {
        let ranks = lock(&self.ranks);
        let registrations = || {
            ranks.states.iter().filter_map(|(rank, state)| match state {
                RankState::Registered(registration) => Some((*rank, registration)),
                RankState::Authenticated | RankState::TimedOut => None,
            })
        };
        let relays = registrations().filter_map(|(rank, registration)| Some((rank, registration.relay?)));
        (registrations().map(|(_, registration)| registration.address.clone()).collect(), relays.collect())
    }
}

async fn serve(
    server: RendezvousServer,
    world_size: usize,
    address: &[u8],
    proofs: Proofs,
    limits: Limits,
) -> Result<(Result<Vec<Vec<u8>>>, JoinSet<()>)> {
    let deadline = Instant::now() + limits.timeout;
    let RendezvousServer { listener, name } = server;
    let mut ranks = Ranks::default();
    ranks.register(0, Registration { address: address.to_vec(), relay: None });
    let state = Arc::new(RegisteredRanks {
        world_size,
        proofs,
        ranks: Mutex::new(ranks),
        ended: Mutex::default(),
        refused: Mutex::default(),
        duplicates: Mutex::default(),
        stranger: Mutex::default(),
        changed: Notify::new(),
        outcome: watch::Sender::new(None),
    });
    let ranks = Arc::downgrade(&state);
    limits
        .awaited
        .found_by(move || ranks.upgrade().map_or_else(Vec::new, |state| lock(&state.ranks).missing(state.world_size)));
    let all_registered = async {
        loop {
            let changed = state.changed.notified();
            if state.is_complete() {
                return None;
            }
            let due = match state.first_ended() {
                Some((rank, at, host)) if at + limits.lost_after <= Instant::now() => {
                    return Some(lost(rank, host, &name, &limits));
                }
                first => first.map_or(deadline, |(_, at, _)| at + limits.lost_after),
            };
            let _ = timeout_at(due, changed).await;
        }
    };
    let (listener, admission) = (Listener::new(listener, None), Admission::new(world_size + EXTRA_CONNECTIONS));
    let (ended, mut connections) =
        serve_until(&state, listener, &admission, timeout_at(deadline, all_registered)).await;
    let (outcome, result) = match ended {
        Ok(None) => {
            let (all, relays) = state.all();
            (Outcome::Complete { list: Answer::Complete(all.clone()).frame(), relays }, Ok(all))
        }
        Ok(Some(lost)) => (Outcome::Ended(Answer::Failed(lost.clone()).frame()), Err(lost)),
        Err(_) => {
            let (missing, what) = (state.missing(), format!("the rendezvous at {name}"));
            (Outcome::Ended(Answer::Missing(missing.clone()).frame()), Err(missing.timed_out(limits.timeout, 0, what)))
        }
    };
    state.outcome.send_replace(Some(Arc::new(outcome)));
    // Every connection ends once the outcome is sent. A client that does not read delays the return by LINGER at most.
    let all_sent = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LINGER, all_sent).await;
    Ok((result, connections))
}

/// The error for a rank whose connection ended after it had registered.
fn lost(rank: usize, host: String, name: &str, limits: &Limits) -> Error {
    let after = limits.lost_after.as_secs_f64();
    let reason = format!(
        "its process died or its connection to the rendezvous at {name} broke, and no other process registered with its rank \
         within {after:.1} s"
    );
    Error::PeerLost { rank, host, reason, noticed_by: 0, progress: None, source: Source::default() }
}

impl Service for RegisteredRanks {
    /// The rank of a process of the job.
    type Client = usize;

    fn tls(&self) -> Option<&Ends> {
        self.proofs.tls.as_ref()
    }

    async fn authenticate(&self, received: ReceivedHello, socket: &mut AsyncSocket) -> Accepted<usize> {
        let Hello { world_size, from, to, purpose, .. } = received.hello;
        if purpose != Purpose::Rendezvous {
            return Err(Refusal::Purpose);
        }
        // `from` is not authenticated here: the note is only for the error text, and there is one per rank at most.
        let note_refusal = |why| {
            if from < self.world_size {
                lock(&self.refused).insert(from, why);
            }
        };
        if let Err(why) = handshake::authenticate(socket, &received, &self.proofs.key).await {
            // A client with another secret closes the connection after the proof of this rank.
            note_refusal("it does not have this rank's secret");
            return Err(why);
        }
        if world_size != self.world_size {
            note_refusal("it has another world size");
            return Err(Refusal::WorldSize);
        }
        if to != 0 || from == 0 || from >= world_size {
            return Err(Refusal::Rank);
        }
        Ok(from)
    }

    /// Serves one connection, from its registration to the outcome.
    async fn serve(self: Arc<Self>, rank: usize, conn: ControlConn) -> Accepted<()> {
        let ControlConn { fork_fd: _fork_fd, socket: mut stream } = conn;
        if let Err(why) = register(&self, rank, &mut stream).await {
            handshake::refuse(&mut stream, why).await;
            return Err(why);
        }
        let mut published = self.outcome.subscribe();
        let outcome = match tree::next_event(&mut stream, &mut published).await {
            Event::Outcome(outcome) => Some(outcome),
            Event::Question => match self.time_out(rank) {
                Some(missing) => {
                    // Best effort: the client ends with a timeout in any case.
                    let _ = stream.write_all(&Answer::Missing(missing).frame()).await;
                    let _ = stream.shutdown().await;
                    return Ok(());
                }
                // All have registered, and the outcome is about to be published.
                None => published.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone()),
            },
            Event::Closed => None,
        };
        match outcome {
            // A client that has ended meanwhile is detected by its peers.
            Some(outcome) => _ = outcome.send(rank, &mut stream).await,
            // The client has ended: another process may register with its rank.
            None => self.end(rank),
        }
        Ok(())
    }

    fn refused(&self, Refused { why, text }: &Refused) {
        let explains = *why == Refusal::NoTls;
        if let Some(text) = text.clone().or_else(|| explains.then(|| why.to_string())) {
            *lock(&self.stranger) = Some(text);
        }
    }
}

/// Registers the rank of a client.
async fn register(state: &RegisteredRanks, from: usize, stream: &mut AsyncSocket) -> std::result::Result<(), Refusal> {
    {
        let mut ranks = lock(&state.ranks);
        if !ranks.claim(from) {
            let host = stream.peer_addr().map_or_else(|_| String::new(), |peer| format!(" from {}", peer.ip()));
            lock(&state.duplicates).insert(from, host);
            return Err(Refusal::Duplicate);
        }
        lock(&state.duplicates).remove(&from);
    }
    let body = async {
        handshake::accept(stream).await?;
        read_frame(stream, REGISTRATION_LIMIT).await
    };
    let body = tokio::time::timeout(handshake::STEP_TIMEOUT, body).await;
    let Some(registration) = body.ok().and_then(|body| Registration::parse(&body.ok()?).ok()) else {
        lock(&state.ranks).set(from, None);
        return Err(Refusal::Protocol);
    };
    lock(&state.ranks).register(from, registration);
    lock(&state.ended).remove(&from);
    state.changed.notify_one();
    Ok(())
}
