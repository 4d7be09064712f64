//! A small server on rank 0 that everybody tells an address, and that then tells everybody all of them.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::handshake::{self, Failed, Hello, Key, Purpose, Refusal};
use super::super::lock;
use super::super::wire::{FRAME_LIMIT, Garbled, Reader, Writer, read_frame};
use super::{check, late};
use crate::error::{Error, Result};

/// The longest list of addresses.
const LIST_LIMIT: usize = 64 << 20;

/// How much longer a rank waits to hear from rank 0 who is missing.
const GRACE: Duration = Duration::from_millis(500);

/// Connections that may be open beside those of the ranks.
const STRANGERS: usize = 256;

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

/// What the server knows.
struct Desk {
    world_size: usize,
    key: Key,
    /// Addresses by rank; `None` while a rank has proven itself but not told its address yet.
    present: Mutex<BTreeMap<usize, Option<Vec<u8>>>>,
    /// By rank: why a process that said to be it was refused, last.
    refused: Mutex<BTreeMap<usize, &'static str>>,
    changed: Notify,
}

impl Desk {
    fn missing(&self) -> Vec<usize> {
        let present = lock(&self.present);
        (0..self.world_size).filter(|rank| !present.get(rank).is_some_and(Option::is_some)).collect()
    }

    /// What is known of missing ranks, for an error text.
    fn refusals(&self, missing: &[usize]) -> String {
        let refused = lock(&self.refused);
        let known = missing.iter().filter_map(|rank| Some((rank, refused.get(rank)?)));
        known.map(|(rank, why)| format!("; a process that says it is rank {rank} was refused: {why}")).collect()
    }

    fn all(&self) -> Vec<Vec<u8>> {
        lock(&self.present).values().flatten().cloned().collect()
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
    let present = Mutex::new(BTreeMap::from([(0, Some(address.to_vec()))]));
    let desk = Arc::new(Desk { world_size, key, present, refused: Mutex::default(), changed: Notify::new() });
    let (publish, published) = watch::channel(None::<Arc<Vec<u8>>>);
    let mut visitors = JoinSet::new();
    let gather = async {
        loop {
            let changed = desk.changed.notified();
            if desk.missing().is_empty() {
                return;
            }
            tokio::select! {
                () = changed => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) if visitors.len() < world_size + STRANGERS => {
                        _ = visitors.spawn(attend(Arc::clone(&desk), stream, published.clone()));
                    }
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                },
                Some(_) = visitors.join_next() => {}
            }
        }
    };
    let complete = timeout_at(deadline, gather).await.is_ok();
    let mut out = Writer(vec![0; 4]);
    let outcome = if complete {
        let all = desk.all();
        out.u8(0).rank(all.len());
        all.iter().for_each(|blob| _ = out.bytes(blob));
        Ok(all)
    } else {
        let missing = desk.missing();
        out.u8(1).rank(missing.len());
        missing.iter().for_each(|rank| _ = out.rank(*rank));
        let refused = desk.refusals(&missing);
        Err(late(timeout, missing, 0, format!("the rendezvous at {host}:{port}{refused}")))
    };
    let len = u32::try_from(out.0.len() - 4).unwrap_or(u32::MAX);
    out.0[..4].copy_from_slice(&len.to_le_bytes());
    publish.send_replace(Some(Arc::new(out.0)));
    drop(publish);
    // Strangers end too: what they wait for has been published. A rank that does not read does not hold up the others.
    let told = async { while visitors.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(GRACE * 4, told).await;
    outcome
}

/// One connection at the desk.
async fn attend(desk: Arc<Desk>, mut stream: TcpStream, mut published: watch::Receiver<Option<Arc<Vec<u8>>>>) {
    let rank = match receive(&desk, &mut stream).await {
        Ok(rank) => rank,
        Err(why) => return handshake::refuse(&mut stream, why).await,
    };
    let list = tokio::select! {
        list = published.wait_for(Option::is_some) => list.ok().and_then(|list| list.clone()),
        // The rank is gone: another process may take its place.
        _ = stream.read_u8() => None,
    };
    match list {
        Some(list) => {
            let _ = stream.write_all(&list).await;
            let _ = stream.shutdown().await;
        }
        None => _ = lock(&desk.present).remove(&rank),
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
    {
        let mut present = lock(&desk.present);
        if present.contains_key(&from) {
            return Err(Refusal::Duplicate);
        }
        present.insert(from, None);
    }
    let told = async {
        handshake::welcome(stream).await?;
        read_frame(stream, FRAME_LIMIT).await
    };
    match tokio::time::timeout(handshake::STEP, told).await {
        Ok(Ok(blob)) => {
            lock(&desk.present).insert(from, Some(blob));
            desk.changed.notify_one();
            Ok(from)
        }
        Ok(Err(_)) | Err(_) => {
            lock(&desk.present).remove(&from);
            Err(Refusal::Stranger)
        }
    }
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
    let mut trouble = "no answer".to_owned();
    let attempts = async {
        loop {
            match attempt(server, &hello, &key, address).await {
                Ok(list) => return Ok(list),
                Err(Failed::Refused(why)) => return Err(why),
                Err(Failed::Broken(how)) => trouble = how,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match timeout_at(Instant::now() + timeout + GRACE, attempts).await {
        Ok(Ok(List::Complete(all))) if all.len() == world_size && all[rank] == address => Ok(all),
        Ok(Ok(List::Complete(_))) => Err(Error::System(format!("{place} gave a list that does not fit"))),
        Ok(Ok(List::Missing(missing))) => Err(late(timeout, missing, rank, place)),
        Ok(Err(Refusal::WorldSize)) => {
            let text =
                format!("rank {rank} was told that there are {world_size} ranks, rank 0 was told otherwise ({place})");
            Err(Error::Mismatch(text))
        }
        Ok(Err(Refusal::Duplicate)) => Err(Error::Mismatch(format!("two processes are rank {rank} ({place})"))),
        Ok(Err(why @ Refusal::Version)) => Err(Error::Mismatch(format!("{place}: {why}"))),
        Ok(Err(
            why @ (Refusal::Stranger
            | Refusal::Job
            | Refusal::Rank
            | Refusal::Secret
            | Refusal::Purpose
            | Refusal::Busy),
        )) => Err(Error::System(format!("{place}: {why}"))),
        Err(_) => Err(late(timeout, vec![0], rank, format!("{place} ({trouble})"))),
    }
}

/// What the server says in the end.
enum List {
    Complete(Vec<Vec<u8>>),
    Missing(Vec<usize>),
}

async fn attempt(server: (&str, u16), hello: &Hello, key: &Key, address: &[u8]) -> std::result::Result<List, Failed> {
    let mut stream = TcpStream::connect(server).await?;
    handshake::introduce(&mut stream, hello, key).await?;
    let mut out = Writer::default();
    stream.write_all(&out.bytes(address).0).await?;
    let list = read_frame(&mut stream, LIST_LIMIT).await?;
    parse(&list).map_err(|garbled| Failed::Broken(garbled.to_string()))
}

fn parse(list: &[u8]) -> std::result::Result<List, Garbled> {
    let mut from = Reader(list);
    let (kind, count) = (from.u8()?, from.rank()?);
    let list = match kind {
        0 => {
            List::Complete((0..count).map(|_| Ok(from.bytes()?.to_vec())).collect::<std::result::Result<_, Garbled>>()?)
        }
        1 => List::Missing((0..count).map(|_| from.rank()).collect::<std::result::Result<_, Garbled>>()?),
        _ => return Err(Garbled("a list of unknown kind")),
    };
    from.end()?;
    Ok(list)
}
