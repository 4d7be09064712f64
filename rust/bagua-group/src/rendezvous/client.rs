//! The exchange of addresses through a TCP server on rank 0: every rank registers its address and gets the list of all addresses, most
//! of them from other ranks.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::super::handshake::{Failed, Hello, Purpose, Refusal};
use super::super::listen::listen;
use super::super::tls::Access;
use super::super::wire::Encoding;
use super::common::{Limits, RETRY_PAUSE, check_arguments, finish_sending, runtime, timed_out};
use super::server::{Registration, RendezvousServer};
use super::tree::{self, Answer, Proofs, Relay};
use crate::error::{Error, Result};

/// How much longer than its deadline a rank waits for rank 0 to answer which ranks are missing. The deadline of rank 0 may be later,
/// because ranks start at different times.
const GRACE: Duration = Duration::from_millis(500);

/// Asks rank 0 which ranks are missing.
const WHICH_ARE_MISSING: u8 = b'?';

/// Exchanges addresses through a TCP server that rank 0 runs on `server` until every rank has all addresses.
///
/// # Errors
/// `Timeout` naming the missing ranks; `PeerLost` naming a rank that ended after it had registered; `System` for a wrong secret or when the
/// server cannot listen; `Mismatch` when world sizes differ or two processes have the same rank (the second gets the error); `InvalidArgument` for an invalid rank, address or port.
pub fn rendezvous_tcp<'a>(
    server: (&str, u16),
    rank: usize,
    world_size: usize,
    address: &[u8],
    access: impl Into<Access<'a>>,
    limits: impl Into<Limits>,
) -> Result<Vec<Vec<u8>>> {
    check_arguments(rank, world_size, address)?;
    let access = access.into();
    if world_size == 1 {
        return Ok(vec![address.to_vec()]);
    }
    let (host, port) = server;
    if port == 0 {
        return Err(Error::InvalidArgument("the other ranks cannot connect to port 0".to_owned()));
    }
    if rank > 0 {
        return exchange_addresses(server, false, rank, world_size, address, &access, limits.into());
    }
    let listener = match listen(server) {
        // The name resolves to the address of a proxy or load balancer, which forwards to this host.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => listen(("0.0.0.0", port)),
        other => other,
    };
    let name = format!("{host}:{port}");
    let listener = listener.map_err(|e| Error::system(&format!("listening on {name} for the rendezvous"), e))?;
    RendezvousServer { listener, name }.serve(world_size, address, access, limits)
}

/// As [`rendezvous_tcp`] on ranks other than 0, through a [`RendezvousServer`], which listens before its address is published: a failed
/// connection is an error at once instead of another attempt.
///
/// # Errors
/// As [`rendezvous_tcp`], and `PeerLost` when the connection to rank 0 fails or breaks.
pub fn rendezvous_at<'a>(
    server: SocketAddr,
    rank: usize,
    world_size: usize,
    address: &[u8],
    access: impl Into<Access<'a>>,
    limits: impl Into<Limits>,
) -> Result<Vec<Vec<u8>>> {
    check_arguments(rank, world_size, address)?;
    if rank == 0 {
        return Err(Error::InvalidArgument("rank 0 serves the rendezvous".to_owned()));
    }
    exchange_addresses(
        (&server.ip().to_string(), server.port()),
        true,
        rank,
        world_size,
        address,
        &access.into(),
        limits.into(),
    )
}

/// The exchange on a rank other than 0. `must_listen`: the server listens already, so that a failed connection means that it is lost.
fn exchange_addresses(
    server: (&str, u16),
    must_listen: bool,
    rank: usize,
    world_size: usize,
    address: &[u8],
    access: &Access<'_>,
    limits: Limits,
) -> Result<Vec<Vec<u8>>> {
    let runtime = runtime()?;
    let proofs = Proofs::of(access)?;
    let deadline = Instant::now() + limits.timeout;
    let exchange = register_and_fetch(server, must_listen, rank, world_size, address, proofs, limits);
    let (all, sending) = match runtime.block_on(exchange) {
        Ok((all, sending)) => (Ok(all), sending),
        Err(error) => (Err(error), JoinSet::new()),
    };
    finish_sending(runtime, sending, deadline);
    all
}

async fn register_and_fetch(
    server: (&str, u16),
    must_listen: bool,
    rank: usize,
    world_size: usize,
    address: &[u8],
    proofs: Proofs,
    limits: Limits,
) -> Result<(Vec<Vec<u8>>, JoinSet<()>)> {
    let (host, port) = server;
    let rendezvous = format!("the rendezvous at {host}:{port}");
    let Limits { timeout, lost_after, awaited } = limits;
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
    let mut awaited_rank = 0;
    let mut last_failure = "no answer".to_owned();
    let lost = |lost: usize, host: String, what: &str, why: &Failed| {
        let reason = format!("it no longer serves {what} ({why})");
        Error::PeerLost { rank: lost, host, reason, noticed_by: rank, progress: None, source: why.source() }
    };
    let attempts = async {
        let is_registered = Arc::new(AtomicBool::new(false));
        let registered = Arc::clone(&is_registered);
        // Once this rank has registered, only rank 0 knows who is missing.
        awaited.found_by(move || if registered.load(Ordering::Relaxed) { Vec::new() } else { vec![0] });
        let mut ended: Option<Instant> = None;
        let (answer, relay) = loop {
            match register(server, &hello, &proofs, address, deadline, &is_registered).await {
                Ok(answer) => break answer,
                Err(Failed::Refused(why)) => return Err(refusal(why, rank, world_size, &rendezvous)),
                Err(Failed::Tls(why)) => return Err(Error::other(format!("{rendezvous}: {why}"))),
                Err(why @ Failed::Broken { .. }) => {
                    // A server that has ended the connection had too many, or has ended itself: the next attempt shows which.
                    let until = ended.get_or_insert_with(Instant::now);
                    let is_over = must_listen || is_registered.load(Ordering::Relaxed) && until.elapsed() > lost_after;
                    if is_over && !why.ended_by_server() {
                        return Err(lost(0, host.to_owned(), &rendezvous, &why));
                    }
                    if !is_registered.load(Ordering::Relaxed) {
                        ended = None;
                    }
                    last_failure = why.to_string();
                }
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        };
        let parent = match answer {
            Answer::Complete(all) => return Ok((all, relay)),
            Answer::Missing(missing) => return Err(missing.timed_out(timeout, rank, rendezvous.clone())),
            Answer::Failed(error) => return Err(error),
            Answer::Fetch(parent) => parent,
        };
        awaited_rank = tree::parent(rank);
        awaited.found_by(move || vec![awaited_rank]);
        last_failure = format!("rank {awaited_rank} at {parent}: no answer");
        loop {
            // Rank 0 has accepted this rank, so a process that refuses it now is not of this job: keep trying.
            let error = match tree::fetch(parent, &Hello { to: awaited_rank, ..hello }, &proofs).await {
                Ok(Ok(all)) => return Ok((all, relay)),
                Ok(Err(error)) => Some(error),
                Err(why) => {
                    last_failure = format!("rank {awaited_rank} at {parent}: {why}");
                    // It listens until all its children have the list.
                    let what = format!("the addresses of {rendezvous}");
                    why.no_listener().then(|| lost(awaited_rank, parent.ip().to_string(), &what, &why))
                }
            };
            if let Some(error) = error {
                if let Some(relay) = relay {
                    drop(relay.publish(Answer::Failed(error.clone()).frame()).await);
                }
                return Err(error);
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    };
    let (all, relay) = match timeout_at(deadline + GRACE, attempts).await {
        Ok(outcome) => outcome?,
        Err(_) => return Err(timed_out(timeout, vec![awaited_rank], rank, format!("{rendezvous} ({last_failure})"))),
    };
    if all.len() != world_size || all[rank] != address {
        return Err(Error::other(format!("{rendezvous} returned a list of addresses without this rank's own")));
    }
    let sending = match relay {
        Some(relay) => relay.publish(Answer::Complete(all.clone()).frame()).await,
        None => JoinSet::new(),
    };
    Ok((all, sending))
}

/// The error for a rank that the server refuses.
fn refusal(why: Refusal, rank: usize, world_size: usize, rendezvous: &str) -> Error {
    match why {
        Refusal::WorldSize => {
            Error::Mismatch(format!("rank {rank} has world size {world_size}, rank 0 has another ({rendezvous})"))
        }
        Refusal::Duplicate => Error::Mismatch(format!("two processes have rank {rank} ({rendezvous})")),
        Refusal::Version(_) | Refusal::NeedsTls | Refusal::NoTls => Error::Mismatch(format!("{rendezvous}: {why}")),
        Refusal::Protocol | Refusal::Job | Refusal::Rank | Refusal::Secret | Refusal::Purpose | Refusal::Busy => {
            Error::other(format!("{rendezvous}: {why}"))
        }
    }
}

/// Registers an address with the server, once, and waits for the answer; at the deadline, asks which ranks are missing. A rank with
/// children in the tree listens for them from here on. Sets `is_registered` once it has registered.
pub(super) async fn register(
    server: (&str, u16),
    hello: &Hello,
    proofs: &Proofs,
    address: &[u8],
    deadline: Instant,
    is_registered: &AtomicBool,
) -> std::result::Result<(Answer, Option<Relay>), Failed> {
    let mut stream = tree::connect(server, hello, proofs).await?;
    let relay = Relay::listen(&stream, hello, proofs).await;
    let registration = Registration { address: address.to_vec(), relay: relay.as_ref().map(|relay| relay.address) };
    stream.write_all(&registration.frame()).await?;
    is_registered.store(true, Ordering::Relaxed);
    let (mut from, mut to) = tokio::io::split(stream);
    let mut answer = std::pin::pin!(Answer::read(&mut from));
    let answer = tokio::select! {
        answer = &mut answer => answer?,
        () = tokio::time::sleep_until(deadline) => {
            to.write_all(&[WHICH_ARE_MISSING]).await?;
            answer.await?
        }
    };
    Ok((answer, relay))
}
