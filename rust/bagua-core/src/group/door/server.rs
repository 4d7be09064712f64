//! The listening side: one thread per process, off everybody's path.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::super::address;
use super::super::admission::{Admission, Candidate};
use super::super::bootstrap::Bootstrap;
use super::super::config::Config;
use super::super::connection::ControlConn;
use super::super::fork::{ForkFd, OwnerProcess};
use super::super::handshake::{self, Hello, Key, Purpose, Refusal, STEP_TIMEOUT};
use super::super::listen::raise_backlog;
use super::super::tls::Ends;
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
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: mpsc::UnboundedSender<()>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
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
    /// The connections that are not authenticated.
    admission: Arc<Admission>,
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
        let listener = std::net::TcpListener::bind(config.listen).map_err(failed)?;
        raise_backlog(&listener).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
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
            admission: Admission::new(PLACES),
            state: Mutex::default(),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::system("starting the door's thread", e))?;
        let (stop, mut stopped) = mpsc::unbounded_channel();
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("bagua-door".to_owned())
            .spawn(move || {
                let fork_fd = ForkFd::new(&listener);
                runtime.block_on(async {
                    tokio::spawn(accept(serving, listener));
                    stopped.recv().await;
                });
                drop((runtime, fork_fd));
            })
            .map_err(|e| Error::system("starting the door's thread", e))?;
        Ok(Door { shared, address, stop, thread: Mutex::new(Some(thread)) })
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

impl Drop for Door {
    fn drop(&mut self) {
        if !self.shared.owner.is_current() {
            // The thread is the parent's.
            std::mem::forget(lock(&self.thread).take());
            return;
        }
        let _ = self.stop.send(());
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
        lock(&self.shared.state).models.clear();
    }
}

/// Accepts visitors until the thread ends.
async fn accept(shared: Arc<Shared>, listener: std::net::TcpListener) {
    // Fails only while the runtime shuts down.
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        let accepted = shared.admission.accept(&listener).await;
        match accepted.and_then(|(stream, candidate)| Ok((ControlConn::tcp(stream)?, candidate))) {
            Ok((conn, candidate)) => _ = tokio::spawn(serve(Arc::clone(&shared), conn, candidate)),
            // The visitor has gone already, or the process has no free descriptor: retry.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Authenticates a visitor and hears what it wants.
async fn serve(shared: Arc<Shared>, conn: ControlConn, candidate: Candidate) {
    let proved = candidate.prove(prove(&shared, conn, &candidate)).await;
    drop(candidate);
    let received = match proved {
        Some(Ok((from, conn))) => receive(&shared, from, conn).await,
        Some(Err(why)) => Err(why),
        None => Err(Refusal::Busy),
    };
    if received.is_err() {
        shared.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// The rank and the connection of a process of the job; any other one is refused.
async fn prove(
    shared: &Shared,
    conn: ControlConn,
    candidate: &Candidate,
) -> std::result::Result<(usize, ControlConn), Refusal> {
    let mut conn = conn.accept(shared.tls.as_ref()).await.map_err(|refused| refused.why)?;
    match authenticate(shared, &mut conn, candidate).await {
        Ok(from) => Ok((from, conn)),
        Err(why) => {
            handshake::refuse(&mut conn.socket, why).await;
            Err(why)
        }
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

/// The rank of a visitor that passes all checks.
async fn authenticate(
    shared: &Shared,
    conn: &mut ControlConn,
    candidate: &Candidate,
) -> std::result::Result<usize, Refusal> {
    let received = candidate.read_hello(&mut conn.socket).await?;
    let Hello { world_size, from, to, purpose, job, .. } = received.hello;
    let Config { rank, world_size: size, .. } = shared.config;
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
    if job != shared.job {
        return Err(Refusal::Job);
    }
    handshake::authenticate(&mut conn.socket, &received, &shared.key).await?;
    Ok(from)
}
