//! The tree that distributes the list of addresses, so that no rank sends more than [`FANOUT`] copies of it.
//!
//! Rank 0 is the root; rank r sends the list to the ranks from r * FANOUT + 1 to r * FANOUT + FANOUT. A rank with such children listens
//! for them before it registers, and registers that address with rank 0. When all ranks have registered, rank 0 sends each child the
//! address of its parent, from which the child fetches the list. In worlds of up to FANOUT + 1 ranks only rank 0 listens.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::super::admission::Admission;
use super::super::connection::{AsyncSocket, ControlConn};
use super::super::handshake::{self, Failed, Hello, Key, Purpose, ReceivedHello, Refusal, STEP_TIMEOUT};
use super::super::listen::{Listener, listen};
use super::super::serve::{Accepted, Service, serve};
use super::super::tls::{Access, Ends};
use super::super::wire::{BytesOf, Encoding, RANKS_LIMIT, Ranks, WORLD_LIMIT, cause, rank, read_frame, socket, text};
use super::common::timed_out;
use crate::error::Error;

/// The most children of a rank.
pub(super) const FANOUT: usize = 16;

/// How long a rank that has the list waits for other ranks to take it before it goes on; slower ones get it from a thread.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// The most connections that are not authenticated, in addition to one for each expected rank.
pub(super) const EXTRA_CONNECTIONS: usize = 256;

/// The longest list of addresses.
const LIST_LIMIT: usize = 64 << 20;

/// The rank that sends the list to a rank other than 0.
pub(in super::super) fn parent(rank: usize) -> usize {
    rank.saturating_sub(1) / FANOUT
}

/// The ranks to which a rank sends the list.
pub(super) fn children(rank: usize, world_size: usize) -> Range<usize> {
    let first = rank.saturating_mul(FANOUT).saturating_add(1).min(world_size);
    first..first.saturating_add(FANOUT).min(world_size)
}

/// Ranks that have not registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct MissingRanks {
    /// The first of them.
    #[serde(with = "Ranks::<RANKS_LIMIT>")]
    named: Vec<usize>,
    /// How many more there are.
    #[serde(with = "rank")]
    others: usize,
    /// What may explain it, for the error text: processes that were refused, for instance.
    #[serde(with = "text")]
    details: String,
}

impl MissingRanks {
    pub(in super::super) fn new(mut all: Vec<usize>, details: String) -> MissingRanks {
        let others = all.len().saturating_sub(RANKS_LIMIT);
        all.truncate(RANKS_LIMIT);
        MissingRanks { named: all, others, details }
    }

    /// The error that names the missing ranks.
    pub(super) fn timed_out(self, after: Duration, noticed_by: usize, mut what: String) -> Error {
        what.push_str(&self.details);
        if self.others > 0 {
            what = format!("{what}; {} more ranks are missing", self.others);
        }
        timed_out(after, self.named, noticed_by, what)
    }
}

/// The server's answer to a registration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) enum Answer {
    /// All addresses, by rank.
    Complete(#[serde(with = "BytesOf::<WORLD_LIMIT>")] Vec<Vec<u8>>),
    /// The deadline passed before these ranks registered.
    Missing(MissingRanks),
    /// All ranks have registered; the rank's parent at this address has the list or will have it.
    Fetch(#[serde(with = "socket")] SocketAddr),
    /// The exchange has ended with this error on every rank.
    Failed(#[serde(with = "cause")] Error),
}

impl Encoding for Answer {}

impl Answer {
    /// Reads an answer.
    pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Answer, Failed> {
        let body = read_frame(stream, LIST_LIMIT).await?;
        Answer::parse(&body).map_err(|malformed| Failed::broken(malformed.to_string()))
    }
}

/// An event that ends a server's wait for the outcome.
pub(super) enum Event<T> {
    /// The outcome is there.
    Outcome(T),
    /// The client asks which ranks are missing.
    Question,
    /// The client has closed the connection, or there will be no outcome.
    Closed,
}

/// Waits for the outcome, or for the client.
pub(super) async fn next_event<T: Clone>(
    stream: &mut AsyncSocket,
    published: &mut watch::Receiver<Option<T>>,
) -> Event<T> {
    tokio::select! {
        outcome = published.wait_for(Option::is_some) => {
            outcome.ok().and_then(|outcome| outcome.clone()).map_or(Event::Closed, Event::Outcome)
        }
        byte = stream.read_u8() => if byte.is_ok() { Event::Question } else { Event::Closed },
    }
}

/// How the ranks of a rendezvous prove themselves.
#[derive(Clone)]
pub(super) struct Proofs {
    /// Of the handshake.
    pub(super) key: Key,
    /// Of TLS, if there is TLS.
    pub(super) tls: Option<Ends>,
}

impl Proofs {
    pub(super) fn of(access: &Access<'_>) -> crate::error::Result<Proofs> {
        Ok(Proofs { key: Key::of_rendezvous(access.secret), tls: Ends::of(access)? })
    }
}

/// Connects, once, within [`STEP_TIMEOUT`]: the operating system would try for minutes to reach a host that is down. Runs the handshake,
/// in which the server may take its time.
pub(super) async fn connect(to: impl ToSocketAddrs, hello: &Hello, proofs: &Proofs) -> Result<AsyncSocket, Failed> {
    let connecting = tokio::time::timeout(STEP_TIMEOUT, TcpStream::connect(to)).await;
    let stream = connecting.map_err(|_| Failed::broken("no answer"))??;
    let mut socket = AsyncSocket::connect(stream, proofs.tls.as_ref()).await?;
    handshake::connect(&mut socket, hello, &proofs.key).await?;
    Ok(socket)
}

/// Fetches the list from a parent, once; the inner error is that with which the exchange ended.
pub(super) async fn fetch(
    from: SocketAddr,
    hello: &Hello,
    proofs: &Proofs,
) -> Result<Result<Vec<Vec<u8>>, Error>, Failed> {
    let mut stream = connect(from, hello, proofs).await?;
    match Answer::read(&mut stream).await? {
        Answer::Complete(all) => Ok(Ok(all)),
        Answer::Failed(error) => Ok(Err(error)),
        Answer::Missing(..) | Answer::Fetch(_) => Err(Failed::broken("it sent no list of addresses")),
    }
}

/// The server from which a rank's children fetch the list. They may connect before the rank has it.
pub(super) struct Relay {
    /// The address that it listens on.
    pub(super) address: SocketAddr,
    parent: Arc<Parent>,
    /// One task, which ends when all children have the frame. Dropping it closes all connections.
    serving: JoinSet<()>,
}

impl Relay {
    /// Listens for the children of the rank that sent `hello` to rank 0, on its local address of that connection. `None` for a rank
    /// without children, and for a rank that cannot listen, whose children get the list from rank 0.
    pub(super) async fn listen(to_root: &AsyncSocket, hello: &Hello, proofs: &Proofs) -> Option<Relay> {
        let Hello { world_size, from: rank, .. } = *hello;
        let missing: BTreeSet<usize> = children(rank, world_size).collect();
        if missing.is_empty() {
            return None;
        }
        let mut address = to_root.local_addr().ok()?;
        address.set_port(0);
        let listener = listen(address).ok()?;
        let address = listener.local_addr().ok()?;
        let parent = Arc::new(Parent {
            rank,
            world_size,
            proofs: proofs.clone(),
            missing: watch::Sender::new(missing),
            frame: watch::Sender::new(None),
        });
        let mut serving = JoinSet::new();
        serving.spawn(serve_children(Arc::clone(&parent), Listener::new(listener, None)));
        Some(Relay { address, parent, serving })
    }

    /// Sends the frame of the list, or of an error, to the children; returns when all have it, or after [`LINGER`], with the task that
    /// still sends it.
    pub(super) async fn publish(mut self, frame: Vec<u8>) -> JoinSet<()> {
        self.parent.frame.send_replace(Some(Arc::new(frame)));
        let _ = tokio::time::timeout(LINGER, self.serving.join_next()).await;
        self.serving
    }
}

/// The rank that serves the list to its children.
struct Parent {
    rank: usize,
    world_size: usize,
    proofs: Proofs,
    /// Children that do not have the list.
    missing: watch::Sender<BTreeSet<usize>>,
    /// What they get, once it is known.
    frame: watch::Sender<Option<Arc<Vec<u8>>>>,
}

/// Serves the list until all children have it.
async fn serve_children(parent: Arc<Parent>, listener: Listener) {
    let mut missing = parent.missing.subscribe();
    let all_have_it = async { missing.wait_for(BTreeSet::is_empty).await.is_ok() };
    serve(&parent, listener, &Admission::new(FANOUT + EXTRA_CONNECTIONS), all_have_it).await;
}

impl Service for Parent {
    /// The rank of a child.
    type Client = usize;

    fn tls(&self) -> Option<&Ends> {
        self.proofs.tls.as_ref()
    }

    async fn authenticate(&self, received: ReceivedHello, socket: &mut AsyncSocket) -> Accepted<usize> {
        let Hello { world_size, from, to, purpose, .. } = received.hello;
        if purpose != Purpose::Rendezvous {
            return Err(Refusal::Purpose);
        }
        handshake::authenticate(socket, &received, &self.proofs.key).await?;
        if world_size != self.world_size {
            return Err(Refusal::WorldSize);
        }
        if to != self.rank || !children(self.rank, world_size).contains(&from) {
            return Err(Refusal::Rank);
        }
        Ok(from)
    }

    async fn serve(self: Arc<Self>, child: usize, conn: ControlConn) -> Accepted<()> {
        let ControlConn { fork_fd: _fork_fd, socket: mut stream } = conn;
        let sent = async {
            handshake::accept(&mut stream).await?;
            if let Event::Outcome(list) = next_event(&mut stream, &mut self.frame.subscribe()).await {
                stream.write_all(&list).await?;
                stream.shutdown().await?;
                self.missing.send_modify(|missing| _ = missing.remove(&child));
            }
            Ok::<_, std::io::Error>(())
        };
        // A child that did not get it connects again.
        let _ = sent.await;
        Ok(())
    }
}
