//! How a list of addresses travels down a tree, so that no rank sends more than [`FAN`] copies of it.
//!
//! Rank 0 is the root; rank r hands the list to the ranks from r * FAN + 1 to r * FAN + FAN. A rank that has such children
//! listens for them from the moment it registers, and tells rank 0 where. A child hears that place from rank 0 once everybody
//! is there, and fetches the list. Worlds of up to FAN + 1 ranks are one level: nobody but rank 0 listens.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::super::handshake::{self, Failed, Hello, Key, Purpose, Refusal, STEP};
use super::super::wire::{Garbled, RANKS_LIMIT, Reader, Writer, read_frame};
use super::late;
use crate::error::Error;

/// How many ranks hear the list from one.
pub(super) const FAN: usize = 16;

/// How long a rank that has the list stays for others that do not take it.
pub(super) const STAY: Duration = Duration::from_secs(2);

/// Connections that may be open beside those that are expected.
pub(super) const STRANGERS: usize = 256;

/// The longest list of addresses.
const LIST_LIMIT: usize = 64 << 20;

/// Who hands the list to a rank other than 0.
pub(super) fn parent(rank: usize) -> usize {
    rank.saturating_sub(1) / FAN
}

/// Whom a rank hands the list to.
pub(super) fn children(rank: usize, world_size: usize) -> Range<usize> {
    let first = rank.saturating_mul(FAN).saturating_add(1).min(world_size);
    first..first.saturating_add(FAN).min(world_size)
}

/// Ranks that did not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Absent {
    /// As many as are named.
    named: Vec<usize>,
    /// How many more there are.
    rest: usize,
}

impl Absent {
    pub(super) fn new(mut all: Vec<usize>) -> Absent {
        let rest = all.len().saturating_sub(RANKS_LIMIT);
        all.truncate(RANKS_LIMIT);
        Absent { named: all, rest }
    }

    pub(super) fn frame(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u8(1).rank(self.named.len());
        self.named.iter().for_each(|rank| _ = out.rank(*rank));
        framed(out.rank(self.rest))
    }

    /// The error to raise.
    pub(super) fn late(self, after: Duration, noticed_by: usize, mut what: String) -> Error {
        if self.rest > 0 {
            what = format!("{what}; {} more ranks are missing", self.rest);
        }
        late(after, self.named, noticed_by, what)
    }
}

/// The frame of all addresses.
pub(super) fn list(all: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Writer::default();
    out.u8(0).rank(all.len());
    all.iter().for_each(|address| _ = out.bytes(address));
    framed(&out)
}

/// The frame that says where the list can be fetched.
pub(super) fn direction(from: SocketAddr) -> Vec<u8> {
    framed(Writer::default().u8(2).text(&from.to_string()))
}

/// A body with its length before it.
pub(super) fn framed(body: &Writer) -> Vec<u8> {
    let mut frame = Writer::default();
    frame.bytes(&body.0);
    frame.0
}

/// What a rank that registered hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// All addresses, by rank.
    Complete(Vec<Vec<u8>>),
    /// Not everybody came.
    Missing(Absent),
    /// Everybody is there, and the rank's parent, here, has the list or will have it.
    Fetch(SocketAddr),
}

impl Answer {
    pub(super) fn parse(body: &[u8]) -> Result<Answer, Garbled> {
        let mut from = Reader(body);
        let answer = match from.u8()? {
            0 => {
                let count = from.rank()?;
                Answer::Complete((0..count).map(|_| Ok(from.bytes()?.to_vec())).collect::<Result<_, Garbled>>()?)
            }
            1 => {
                let count = from.rank()?;
                let named = (0..count).map(|_| from.rank()).collect::<Result<_, Garbled>>()?;
                Answer::Missing(Absent { named, rest: from.rank()? })
            }
            2 => Answer::Fetch(place(&from.text()?)?),
            _ => return Err(Garbled("an answer of unknown kind")),
        };
        from.end()?;
        Ok(answer)
    }

    /// Reads one.
    pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Answer, Failed> {
        let body = read_frame(stream, LIST_LIMIT).await?;
        Answer::parse(&body).map_err(|garbled| Failed::broken(garbled.to_string()))
    }
}

/// A place that somebody else named.
pub(super) fn place(text: &str) -> Result<SocketAddr, Garbled> {
    text.parse().map_err(|_| Garbled("a place cannot be read"))
}

/// What ends a wait for news.
pub(super) enum Heard<T> {
    Outcome(T),
    /// The other end asks for them now.
    Question,
    /// It hung up, or there will be no news.
    End,
}

/// Waits for the news, or for the other end.
pub(super) async fn news<T: Clone>(stream: &mut TcpStream, published: &mut watch::Receiver<Option<T>>) -> Heard<T> {
    tokio::select! {
        news = published.wait_for(Option::is_some) => {
            news.ok().and_then(|news| news.clone()).map_or(Heard::End, Heard::Outcome)
        }
        said = stream.read_u8() => if said.is_ok() { Heard::Question } else { Heard::End },
    }
}

/// Connects, once. A host that is gone does not say so, and the system would wait for it for minutes.
pub(super) async fn connect(to: impl ToSocketAddrs) -> Result<TcpStream, Failed> {
    let connecting = tokio::time::timeout(STEP, TcpStream::connect(to)).await;
    Ok(connecting.map_err(|_| Failed::broken("no answer"))??)
}

/// Asks a parent for the list, once.
pub(super) async fn fetch(from: SocketAddr, hello: &Hello, key: &Key) -> Result<Vec<Vec<u8>>, Failed> {
    let mut stream = connect(from).await?;
    handshake::introduce(&mut stream, hello, key).await?;
    match Answer::read(&mut stream).await? {
        Answer::Complete(all) => Ok(all),
        Answer::Missing(..) | Answer::Fetch(_) => Err(Failed::broken("it answered with something else")),
    }
}

/// Where a rank's children fetch the list. They may come before it is there.
pub(super) struct Relay {
    /// Where it listens.
    pub(super) at: SocketAddr,
    publish: watch::Sender<Option<Arc<Vec<u8>>>>,
    /// One task, which ends when all children have the list. Dropping it closes everything.
    serving: JoinSet<()>,
}

impl Relay {
    /// Listens for the children of the rank that said hello to rank 0, on the address that it has towards it. `None` for a
    /// rank without children, and for one that cannot listen: then rank 0 gives them the list.
    pub(super) async fn open(towards: &TcpStream, hello: &Hello, key: &Key) -> Option<Relay> {
        let Hello { world_size, from: rank, .. } = *hello;
        if children(rank, world_size).is_empty() {
            return None;
        }
        let mut at = towards.local_addr().ok()?;
        at.set_port(0);
        let listener = TcpListener::bind(at).await.ok()?;
        let at = listener.local_addr().ok()?;
        let (publish, published) = watch::channel(None);
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, Parent { rank, world_size, key: key.clone() }, published));
        Some(Relay { at, publish, serving })
    }

    /// Gives the children the list; returns when all have it, or have had time enough.
    pub(super) async fn hand_over(mut self, all: &[Vec<u8>]) {
        self.publish.send_replace(Some(Arc::new(list(all))));
        // A child that did not come says so itself, when its own time is over.
        let _ = tokio::time::timeout(STAY, self.serving.join_next()).await;
    }
}

/// Who is asked.
#[derive(Clone)]
struct Parent {
    rank: usize,
    world_size: usize,
    key: Key,
}

async fn serve(listener: TcpListener, parent: Parent, published: watch::Receiver<Option<Arc<Vec<u8>>>>) {
    let mut absent: BTreeSet<usize> = children(parent.rank, parent.world_size).collect();
    let mut visitors = JoinSet::new();
    while !absent.is_empty() {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if visitors.len() < FAN + STRANGERS => {
                    _ = visitors.spawn(attend(parent.clone(), stream, published.clone()));
                }
                Ok(_) => {}
                // Out of descriptors, or the client is gone again.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            },
            Some(told) = visitors.join_next() => {
                if let Ok(Some(child)) = told {
                    absent.remove(&child);
                }
            }
        }
    }
}

/// One connection at a relay: which child it was, if one now has the list.
async fn attend(
    parent: Parent,
    mut stream: TcpStream,
    mut published: watch::Receiver<Option<Arc<Vec<u8>>>>,
) -> Option<usize> {
    let child = match examine(&parent, &mut stream).await {
        Ok(child) => child,
        Err(why) => {
            handshake::refuse(&mut stream, why).await;
            return None;
        }
    };
    handshake::welcome(&mut stream).await.ok()?;
    let Heard::Outcome(list) = news(&mut stream, &mut published).await else { return None };
    stream.write_all(&list).await.ok()?;
    stream.shutdown().await.ok()?;
    Some(child)
}

async fn examine(parent: &Parent, stream: &mut TcpStream) -> Result<usize, Refusal> {
    let greeted = handshake::greet(stream).await?;
    let Hello { world_size, from, to, purpose, .. } = greeted.hello;
    if purpose != Purpose::Rendezvous {
        return Err(Refusal::Purpose);
    }
    handshake::prove(stream, &greeted, &parent.key).await?;
    if world_size != parent.world_size {
        return Err(Refusal::WorldSize);
    }
    if to != parent.rank || !children(parent.rank, world_size).contains(&from) {
        return Err(Refusal::Rank);
    }
    Ok(from)
}
