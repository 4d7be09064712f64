//! The server of a rank: one thread per process, which only joining ranks and status requests use.

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
use super::super::serve::{Accepted, Server, Service};
use super::super::tls::{Ends, Refused};
use super::super::wire::{Encoding, read_frame};
use super::connection::JoinConnection;
use super::message::{JobStatus, JoinMessage, JoinRequest};
use crate::error::{Error, Result};
use crate::wait::lock;

/// How long connecting the next view may take at least, however short the heartbeat timeout is: several round trips, on
/// a line with hundreds of milliseconds of delay too. Rounds wait for it.
const CONNECT: Duration = Duration::from_secs(5);

/// The most connections at a time that are not authenticated.
const PLACES: usize = 128;

/// The most ranks that wait to join one model.
const QUEUE: usize = 8;

/// The longest first message of a client.
const FIRST_LIMIT: usize = 64 * 1024;

/// The server by which one rank lets others join. Ends when it is dropped.
pub struct JoinServer {
    // Dropped first: it serves what is shared.
    _server: Server,
    shared: Arc<JoinService>,
    address: SocketAddr,
}

/// State that the connections of the server share.
struct JoinService {
    /// The parameters of groups that this process joins later. Rank and size are those of the job.
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
    state: Mutex<KnownJob>,
}

/// The state of the job, as far as this rank knows it.
#[derive(Default)]
struct KnownJob {
    in_job: bool,
    /// By name.
    models: HashMap<String, Model>,
    /// The addresses at which the servers of other ranks listen, as far as this rank knows them.
    servers: HashMap<usize, SocketAddr>,
}

struct Model {
    /// See [`JoinRequest::digest`].
    digest: [u8; 32],
    /// Ranks that wait to join, first come first.
    joiners: VecDeque<(usize, JoinRequest, JoinConnection)>,
}

impl JoinServer {
    /// Listens at the configuration's address. `token` is a random number of the job. It is the secret if there is
    /// none.
    ///
    /// # Errors
    /// `System` when the socket or the thread cannot be made.
    pub fn open(config: Config, token: &[u8]) -> Result<JoinServer> {
        let mut config = config;
        if config.host_id.is_empty() {
            config.host_id = address::host_id()?;
        }
        if config.host_name.is_empty() {
            config.host_name = address::host_name();
        }
        let tls = Ends::of(&config.access())?;
        let owner = OwnerProcess::install()?;
        let failed = |e| Error::system(&format!("listening on {} for joining ranks", config.listen), e);
        let listener = listen(config.listen).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        config.listen.set_port(0);
        let key = Key::new(&config.secret, &handshake::digest(&[b"bagua joining", token]));
        let job = key.number(b"job").to_le_bytes();
        let incarnation = u64::from_le_bytes(handshake::random()?);
        let shared = Arc::new(JoinService {
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
        let server = Server::start("bagua-join", Arc::clone(&shared), listener, PLACES)?;
        Ok(JoinServer { _server: server, shared, address })
    }

    /// Returns the address at which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.shared.config.rank
    }

    /// See [`JobStatus::incarnation`].
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

    /// Notes where the server of another rank listens.
    pub fn note_server(&self, rank: usize, at: SocketAddr) {
        lock(&self.shared.state).servers.insert(rank, at);
    }

    /// Returns the addresses at which the servers of other ranks listen, by rank, as far as this rank knows them.
    pub fn servers(&self) -> Vec<(usize, SocketAddr)> {
        let mut servers: Vec<_> = lock(&self.shared.state).servers.iter().map(|(rank, at)| (*rank, *at)).collect();
        servers.sort_unstable();
        servers
    }

    /// Requests the state of another rank from its server, within `limit`.
    ///
    /// # Errors
    /// `System` when no server answers there, or the server refuses.
    pub fn status(&self, rank: usize, at: SocketAddr, limit: Duration) -> Result<JobStatus> {
        let mut conn = self.connect(rank, at, limit)?;
        conn.send(&JoinMessage::GetStatus)?;
        match conn.receive(limit)? {
            JoinMessage::Status(status) if status.rank == rank => Ok(status),
            other => Err(Error::other(format!("the join server at {at} answers {other:?}"))),
        }
    }

    /// Connects to the server of another rank.
    pub fn connect(&self, rank: usize, at: SocketAddr, limit: Duration) -> Result<JoinConnection> {
        self.shared.owner.check()?;
        let JoinService { config, job, key, tls, .. } = &*self.shared;
        let hello = Hello {
            world_size: config.world_size,
            from: config.rank,
            to: rank,
            purpose: Purpose::Join,
            group: 0,
            channel: 0,
            index: 0,
            job: *job,
        };
        JoinConnection::to(at, &hello, (key, tls.as_ref()), limit)
    }

    /// Listens for the next group, as rank `place` of `size` ranks.
    pub fn bind(&self, view: u64, place: usize, size: usize, name: &str) -> Result<Bootstrap> {
        let base = self.shared.config.clone();
        let connect_timeout = base.connect_timeout.min(base.heartbeat_timeout.max(CONNECT));
        Bootstrap::bind(Config { rank: place, world_size: size, view, name: name.to_owned(), connect_timeout, ..base })
    }

    /// Keeps ranks that ask to join a model's averaging from here on.
    pub fn accept_joins(&self, model: &str, digest: [u8; 32]) {
        lock(&self.shared.state).models.insert(model.to_owned(), Model { digest, joiners: VecDeque::new() });
    }

    /// Closes the connections of ranks that wait to join a model, and keeps no more.
    pub fn refuse_joins(&self, model: &str) {
        lock(&self.shared.state).models.remove(model);
    }

    /// The first rank that waits to join a model.
    pub fn first_joiner(&self, model: &str) -> Option<usize> {
        lock(&self.shared.state).models.get(model)?.joiners.front().map(|(rank, ..)| *rank)
    }

    /// Takes the first rank that waits to join a model.
    pub fn take_joiner(&self, model: &str) -> Option<(usize, JoinRequest, JoinConnection)> {
        lock(&self.shared.state).models.get_mut(model)?.joiners.pop_front()
    }
}

impl Service for JoinService {
    /// The rank of a process of the job.
    type Client = usize;

    fn tls(&self) -> Option<&Ends> {
        self.tls.as_ref()
    }

    async fn authenticate(&self, received: ReceivedHello, socket: &mut AsyncSocket) -> Accepted<usize> {
        let Hello { world_size, from, to, purpose, job, .. } = received.hello;
        let Config { rank, world_size: size, .. } = self.config;
        if world_size != size {
            return Err(Refusal::WorldSize);
        }
        // A process may ask whether another one has its own rank.
        if to != rank || from >= size {
            return Err(Refusal::Rank);
        }
        if purpose != Purpose::Join {
            return Err(Refusal::Purpose);
        }
        if job != self.job {
            return Err(Refusal::Job);
        }
        handshake::authenticate(socket, &received, &self.key).await?;
        Ok(from)
    }

    async fn serve(self: Arc<Self>, from: usize, conn: ControlConn) -> Accepted<()> {
        receive(&self, from, conn).await
    }

    fn refused(&self, _: &Refused) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Handles the request of a process of the job.
async fn receive(shared: &JoinService, from: usize, mut conn: ControlConn) -> std::result::Result<(), Refusal> {
    handshake::accept(&mut conn.socket).await.map_err(|_| Refusal::Protocol)?;
    let frame = tokio::time::timeout(STEP_TIMEOUT, read_frame(&mut conn.socket, FIRST_LIMIT)).await;
    let frame = frame.map_err(|_| Refusal::Protocol)?.map_err(|_| Refusal::Protocol)?;
    match JoinMessage::parse(&frame).map_err(|_| Refusal::Protocol)? {
        JoinMessage::GetStatus => {
            let status = {
                let state = lock(&shared.state);
                let models = state.models.keys().cloned().collect();
                let (rank, incarnation) = (shared.config.rank, shared.incarnation);
                JobStatus { rank, incarnation, in_job: state.in_job, models }
            };
            send(&mut conn, &JoinMessage::Status(status)).await;
            Ok(())
        }
        JoinMessage::Join(request) => {
            if let Some((why, mut conn)) = keep(shared, from, request, conn) {
                send(&mut conn, &why).await;
            }
            Ok(())
        }
        _ => Err(Refusal::Protocol),
    }
}

/// Keeps a rank that asks to join, or returns why not.
fn keep(
    shared: &JoinService,
    from: usize,
    request: JoinRequest,
    conn: ControlConn,
) -> Option<(JoinMessage, ControlConn)> {
    let no = |for_ever, text: &str| Some(JoinMessage::Refused { for_ever, text: text.to_owned() });
    let mut state = lock(&shared.state);
    let (in_job, rank) = (state.in_job, shared.config.rank);
    let why = match state.models.get(&request.model) {
        _ if !in_job => no(false, "the job is not formed yet"),
        None => no(false, &format!("rank {rank} averages no model {:?}", request.model)),
        Some(model) if model.digest != request.digest => no(
            true,
            &format!(
                "model {:?} differs from that of rank {rank} in its parameters, buffers or options",
                request.model
            ),
        ),
        Some(model) if model.joiners.len() >= QUEUE => no(false, "too many ranks join at a time"),
        Some(_) => None,
    };
    if let Some(why) = why {
        return Some((why, conn));
    }
    let conn = conn.into_data().map(|conn| JoinConnection::over(conn, format!("rank {from}, which asks to join,")));
    if let (Ok(conn), Some(model)) = (conn, state.models.get_mut(&request.model)) {
        // A second connection of a rank replaces the first, which it has abandoned.
        model.joiners.retain(|(rank, ..)| *rank != from);
        model.joiners.push_back((from, request, conn));
    }
    None
}

async fn send(conn: &mut ControlConn, message: &JoinMessage) {
    let frame = message.frame();
    // Best effort: the client may have ended.
    let _ = tokio::time::timeout(STEP_TIMEOUT, async {
        conn.socket.write_all(&frame).await?;
        conn.socket.shutdown().await
    })
    .await;
}
