//! A small server on rank 0 that everybody tells an address, and that then tells everybody all of them, the greater part by way
//! of others.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, timeout_at};

use super::super::handshake::{self, Failed, Hello, Key, Purpose, Refusal};
use super::server::{Registration, RendezvousServer};
use super::tree::{self, Answer, Relay};
use super::{PAUSE, check_all, key, late, runtime};
use crate::error::{Error, Result};

/// How much longer a rank waits to hear from rank 0 who is missing. Ranks do not start at one moment, so each asks when its own
/// time is over: rank 0's may not be.
const GRACE: Duration = Duration::from_millis(500);

/// What a rank asks with.
const WHO_IS_MISSING: u8 = b'?';

/// Spreads addresses through a small TCP server that rank 0 runs on `server` until everybody has everything.
///
/// # Errors
/// `Timeout` naming the missing ranks; `System` for a wrong secret or an address that cannot be used; `Mismatch` when world
/// sizes differ or two processes claim one rank (the second hears it); `InvalidArgument` for a rank or port that makes no sense.
pub fn rendezvous_tcp(
    server: (&str, u16),
    rank: usize,
    world_size: usize,
    address: &[u8],
    secret: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    check_all(rank, world_size, address)?;
    if world_size == 1 {
        return Ok(vec![address.to_vec()]);
    }
    let (host, port) = server;
    if port == 0 {
        return Err(Error::InvalidArgument("port 0 is no place for other ranks to find".to_owned()));
    }
    if rank > 0 {
        return visit(server, false, rank, world_size, address, secret, timeout);
    }
    let listener = match TcpListener::bind(server) {
        // The name leads here by way of somebody else's address.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => TcpListener::bind(("0.0.0.0", port)),
        other => other,
    };
    let listener = listener.map_err(|e| Error::system(&format!("listening on {host}:{port} for the rendezvous"), e))?;
    RendezvousServer::on(listener, format!("{host}:{port}"))?.serve(world_size, address, secret, timeout)
}

/// Spreads addresses as [`rendezvous_tcp`] does on ranks other than 0, by way of a [`RendezvousServer`]: as that listens before
/// anybody hears of its place, nobody waits for it to come.
///
/// # Errors
/// Those of [`rendezvous_tcp`], and `PeerLost` as soon as rank 0 does not answer, or no longer.
pub fn rendezvous_at(
    server: SocketAddr,
    rank: usize,
    world_size: usize,
    address: &[u8],
    secret: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    check_all(rank, world_size, address)?;
    if rank == 0 {
        return Err(Error::InvalidArgument("rank 0 serves the rendezvous".to_owned()));
    }
    visit((&server.ip().to_string(), server.port()), true, rank, world_size, address, secret, timeout)
}

fn visit(
    server: (&str, u16),
    listens: bool,
    rank: usize,
    world_size: usize,
    address: &[u8],
    secret: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(join(server, listens, rank, world_size, address, key(secret), timeout));
    // A name that is still being looked up must not hold up a caller whose time is over.
    runtime.shutdown_background();
    outcome
}

async fn join(
    server: (&str, u16),
    listens: bool,
    rank: usize,
    world_size: usize,
    address: &[u8],
    key: Key,
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let (host, port) = server;
    let place = format!("the rendezvous at {host}:{port}");
    let deadline = Instant::now() + timeout;
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
            match register(server, &hello, &key, address, deadline).await {
                Ok(heard) => break heard,
                Err(Failed::Refused(why)) => return Err(refused(why, rank, world_size, &place)),
                Err(Failed::Broken { how, source }) if listens => {
                    let reason = format!("it no longer serves {place} ({how})");
                    let host = host.to_owned();
                    return Err(Error::PeerLost { rank: 0, host, reason, noticed_by: rank, progress: None, source });
                }
                Err(Failed::Broken { how, .. }) => trouble = how,
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
    let (all, relay) = match timeout_at(deadline + GRACE, attempts).await {
        Ok(outcome) => outcome?,
        Err(_) => return Err(late(timeout, vec![awaited], rank, format!("{place} ({trouble})"))),
    };
    if all.len() != world_size || all[rank] != address {
        return Err(Error::other(format!("{place} gave a list that does not fit")));
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
            Error::other(format!("{place}: {why}"))
        }
    }
}

/// Tells the server an address, once, and hears how it ended, or at the deadline who is missing. A rank with children listens
/// for them from here on.
pub(super) async fn register(
    server: (&str, u16),
    hello: &Hello,
    key: &Key,
    address: &[u8],
    deadline: Instant,
) -> std::result::Result<(Answer, Option<Relay>), Failed> {
    let mut stream = tree::connect(server).await?;
    handshake::introduce(&mut stream, hello, key).await?;
    let relay = Relay::open(&stream, hello, key).await;
    let registration = Registration { address: address.to_vec(), relay: relay.as_ref().map(|relay| relay.at) };
    stream.write_all(&registration.frame()).await?;
    let (mut from, mut to) = stream.split();
    let mut answer = std::pin::pin!(Answer::read(&mut from));
    let answer = tokio::select! {
        answer = &mut answer => answer?,
        () = tokio::time::sleep_until(deadline) => {
            to.write_all(&[WHO_IS_MISSING]).await?;
            answer.await?
        }
    };
    Ok((answer, relay))
}
