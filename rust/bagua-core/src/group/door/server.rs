//! The listening side: one thread per process, off everybody's path.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use super::super::address;
use super::super::bootstrap::Bootstrap;
use super::super::config::Config;
use super::super::connection::{AsyncSocket, ControlConn};
use super::super::fork::OwnerProcess;
use super::super::handshake::{self, Hello, Key, Purpose, ReceivedHello, Refusal, STEP_TIMEOUT};
use super::super::listen::{Listener, listen};
use super::super::serve::{Server, Service};
use super::super::tls::{Ends, Refused};
use super::super::wire::{Encoding, read_frame};
use super::message::{Answer, Asked, DoorMessage};
use super::visit::Visit;
use crate::error::{Error, Result};
use crate::wait::lock;

/// How long connecting the next view may take at least, however short the heartbeat timeout is: several round trips, on a line with
/// hundreds of milliseconds of delay too. Rounds wait for it.
const CONNECT: Duration = Duration::from_secs(5);

/// The most connections at a time that are not authenticated.
const PLACES: usize = 128;

/// The most visitors that wait for one model.
const QUEUE: usize = 8;

/// The longest first message of a visitor.
const FIRST_LIMIT: usize = 64 * 1024;

/// The door of one rank. Closed when it is dropped.
pub struct Door {
    // Dropped first: it serves what is shared.
    _server: Server,
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    /// Of groups that this process enters through doors; rank and size are those of the job.
    config: Config,
    owner: OwnerProcess,
    key: Key,
    /// The ends of its TLS connections; `None` without TLS.
    tls: Option<Ends>,
    /// Public name of the job.
    job: [u8; 8],
    incarnation: u64,
    /// Connections that were not authenticated, or whose first message was none.
    refused: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    in_job: bool,
    /// Visitors by model.
    models: HashMap<String, Model>,
    /// Doors of other ranks, as far as this one has heard of them.
    doors: HashMap<usize, SocketAddr>,
}

struct Model {
    /// See [`Asked::digest`].
    digest: [u8; 32],
    visitors: VecDeque<(usize, Asked, Visit)>,
}

impl Door {
    /// Opens the door of a rank: listens at the configuration's address. `token`: a random number of the job, which stands in for a
    /// secret where there is none.
    ///
    /// # Errors
    /// `System` when the socket or the thread cannot be made.
    pub fn open(config: Config, token: &[u8]) -> Result<Door> {
        let mut config = config;
        if config.host_id.is_empty() {
            config.host_id = address::host_id()?;
        }
        if config.host_name.is_empty() {
            config.host_name = address::host_name();
        }
        let tls = Ends::of(&config.access())?;
        let owner = OwnerProcess::install()?;
        let failed = |e| Error::system(&format!("listening on {} for newcomers", config.listen), e);
        let listener = listen(config.listen).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        config.listen.set_port(0);
        let key = Key::new(&config.secret, &handshake::digest(&[b"bagua door", token]));
        let job = key.number(b"job").to_le_bytes();
        let incarnation = u64::from_le_bytes(handshake::random()?);
        let shared = Arc::new(Shared {
            config,
            owner,
            key,
            tls,
            job,
            incarnation,
            refused: AtomicU64::new(0),
            state: Mutex::default(),
        });
        let listener = Listener::new(listener, None);
        let server = Server::start("bagua-door", Arc::clone(&shared), listener, PLACES)?;
        Ok(Door { _server: server, shared, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.shared.config.rank
    }

    /// See [`Answer::incarnation`].
    pub fn incarnation(&self) -> u64 {
        self.shared.incarnation
    }

    /// How many connections were refused.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// This rank is in the job now.
    pub fn enter_job(&self) {
        lock(&self.shared.state).in_job = true;
    }

    /// Where the door of another rank is.
    pub fn note_door(&self, rank: usize, at: SocketAddr) {
        lock(&self.shared.state).doors.insert(rank, at);
    }

    /// The doors of other ranks that this one has heard of, by rank.
    pub(crate) fn doors(&self) -> Vec<(usize, SocketAddr)> {
        let mut doors: Vec<_> = lock(&self.shared.state).doors.iter().map(|(rank, at)| (*rank, *at)).collect();
        doors.sort_unstable();
        doors
    }

    /// Asks at the door of another rank, within `limit`.
    ///
    /// # Errors
    /// `System` when nobody answers there, or the door refuses.
    pub fn ask(&self, rank: usize, at: SocketAddr, limit: Duration) -> Result<Answer> {
        let mut visit = self.visit(rank, at, limit)?;
        visit.send(&DoorMessage::Ask)?;
        match visit.receive(limit)? {
            DoorMessage::Answer(answer) if answer.rank == rank => Ok(answer),
            other => Err(Error::other(format!("the door at {at} answers {other:?}"))),
        }
    }

    /// Connects to the door of another rank.
    pub(crate) fn visit(&self, rank: usize, at: SocketAddr, limit: Duration) -> Result<Visit> {
        self.shared.owner.check()?;
        let Shared { config, job, key, tls, .. } = &*self.shared;
        let hello = Hello {
            world_size: config.world_size,
            from: config.rank,
            to: rank,
            purpose: Purpose::Door,
            group: 0,
            channel: 0,
            index: 0,
            job: *job,
        };
        Visit::to(at, &hello, (key, tls.as_ref()), limit)
    }

    /// Binds as rank `place` of a group of these ranks of the job.
    pub(crate) fn bind(&self, view: u64, place: usize, size: usize, name: &str) -> Result<Bootstrap> {
        let base = self.shared.config.clone();
        let connect_timeout = base.connect_timeout.min(base.heartbeat_timeout.max(CONNECT));
        Bootstrap::bind(Config { rank: place, world_size: size, view, name: name.to_owned(), connect_timeout, ..base })
    }

    /// Keeps visitors of a model from here on.
    pub(crate) fn welcome(&self, model: &str, digest: [u8; 32]) {
        lock(&self.shared.state).models.insert(model.to_owned(), Model { digest, visitors: VecDeque::new() });
    }

    /// Sends the visitors of a model away, and keeps no more.
    pub(crate) fn close_to(&self, model: &str) {
        lock(&self.shared.state).models.remove(model);
    }

    /// The rank of the first visitor that waits for a model.
    pub(crate) fn first_visitor(&self, model: &str) -> Option<usize> {
        lock(&self.shared.state).models.get(model)?.visitors.front().map(|(rank, ..)| *rank)
    }

    /// Takes the first visitor that waits for a model.
    pub(crate) fn take_visitor(&self, model: &str) -> Option<(usize, Asked, Visit)> {
        lock(&self.shared.state).models.get_mut(model)?.visitors.pop_front()
    }
}

impl Service for Shared {
    /// The rank of a process of the job.
    type Client = usize;

    fn tls(&self) -> Option<&Ends> {
        self.tls.as_ref()
    }

    async fn authenticate(
        &self,
        received: ReceivedHello,
        socket: &mut AsyncSocket,
    ) -> std::result::Result<usize, Refusal> {
        let Hello { world_size, from, to, purpose, job, .. } = received.hello;
        let Config { rank, world_size: size, .. } = self.config;
        if world_size != size {
            return Err(Refusal::WorldSize);
        }
        // A process may ask at the door of its own rank whether another one has it.
        if to != rank || from >= size {
            return Err(Refusal::Rank);
        }
        if purpose != Purpose::Door {
            return Err(Refusal::Purpose);
        }
        if job != self.job {
            return Err(Refusal::Job);
        }
        handshake::authenticate(socket, &received, &self.key).await?;
        Ok(from)
    }

    async fn serve(self: Arc<Self>, from: usize, conn: ControlConn) -> std::result::Result<(), Refusal> {
        receive(&self, from, conn).await
    }

    fn refused(&self, _: &Refused) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Handles the request of a process of the job.
async fn receive(shared: &Shared, from: usize, mut conn: ControlConn) -> std::result::Result<(), Refusal> {
    handshake::accept(&mut conn.socket).await.map_err(|_| Refusal::Protocol)?;
    let frame = tokio::time::timeout(STEP_TIMEOUT, read_frame(&mut conn.socket, FIRST_LIMIT)).await;
    let frame = frame.map_err(|_| Refusal::Protocol)?.map_err(|_| Refusal::Protocol)?;
    match DoorMessage::parse(&frame).map_err(|_| Refusal::Protocol)? {
        DoorMessage::Ask => {
            let answer = {
                let state = lock(&shared.state);
                let models = state.models.keys().cloned().collect();
                let (rank, incarnation) = (shared.config.rank, shared.incarnation);
                Answer { rank, incarnation, in_job: state.in_job, models }
            };
            say(&mut conn, &DoorMessage::Answer(answer)).await;
            Ok(())
        }
        DoorMessage::Join(asked) => {
            if let Some((why, mut conn)) = keep(shared, from, asked, conn) {
                say(&mut conn, &why).await;
            }
            Ok(())
        }
        _ => Err(Refusal::Protocol),
    }
}

/// Keeps a visitor for its model, or returns why not.
fn keep(shared: &Shared, from: usize, asked: Asked, conn: ControlConn) -> Option<(DoorMessage, ControlConn)> {
    let no = |for_ever, text: &str| Some(DoorMessage::Refused { for_ever, text: text.to_owned() });
    let mut state = lock(&shared.state);
    let (in_job, rank) = (state.in_job, shared.config.rank);
    let why = match state.models.get(&asked.model) {
        _ if !in_job => no(false, "the job is not formed yet"),
        None => no(false, &format!("rank {rank} averages no model {:?}", asked.model)),
        Some(model) if model.digest != asked.digest => no(
            true,
            &format!("model {:?} differs from that of rank {rank} in its parameters, buffers or options", asked.model),
        ),
        Some(model) if model.visitors.len() >= QUEUE => no(false, "too many newcomers at a time"),
        Some(_) => None,
    };
    if let Some(why) = why {
        return Some((why, conn));
    }
    let visit = conn.into_data().map(|conn| Visit::over(conn, format!("rank {from}, which asks to be let in,")));
    if let (Ok(visit), Some(model)) = (visit, state.models.get_mut(&asked.model)) {
        // A second visit of a rank replaces the first, which it has abandoned.
        model.visitors.retain(|(rank, ..)| *rank != from);
        model.visitors.push_back((from, asked, visit));
    }
    None
}

async fn say(conn: &mut ControlConn, message: &DoorMessage) {
    let frame = message.frame();
    // Best effort: a visitor that does not read is its own trouble.
    let _ = tokio::time::timeout(STEP_TIMEOUT, async {
        conn.socket.write_all(&frame).await?;
        conn.socket.shutdown().await
    })
    .await;
}
