//! The exchange through a store that rank 0 serves until every rank has the addresses.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use super::super::handshake::{Failed, Refusal};
use super::super::listen::listen;
use super::super::store::{Server, StoreServer, TcpStore};
use super::super::tls::Access;
use super::entry::MissingRanks;
use super::exchange::Exchange;
use super::{Limits, check_arguments};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// How long rank 0 waits for other ranks to take the addresses. A thread then serves slower ranks.
const LINGER: Duration = Duration::from_secs(2);

/// Exchanges addresses through a TCP server that rank 0 runs on `server` until every rank has all addresses.
///
/// # Errors
/// `Timeout` naming the missing ranks; `PeerLost` naming a rank that ended after it had registered; `System` for a
/// wrong secret or when the server cannot listen; `Mismatch` when world sizes differ or two processes have the same
/// rank (the second gets the error); `InvalidArgument` for an invalid rank, address or port.
pub fn rendezvous_tcp<'a>(
    server: (&str, u16),
    rank: usize,
    world_size: usize,
    address: &[u8],
    access: impl Into<Access<'a>>,
    limits: impl Into<Limits>,
) -> Result<Vec<Vec<u8>>> {
    check_arguments(rank, world_size, address)?;
    if world_size == 1 {
        return Ok(vec![address.to_vec()]);
    }
    let (host, port) = server;
    if port == 0 {
        return Err(Error::InvalidArgument("the other ranks cannot connect to port 0".to_owned()));
    }
    if rank > 0 {
        return fetch(server, false, rank, world_size, address, &access.into(), &limits.into());
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

/// Does the same as [`rendezvous_tcp`] on ranks other than 0. The server listens already, because the caller published
/// its address afterwards. So a failed connection is an error at once, and no reason for another attempt.
///
/// # Errors
/// The errors of [`rendezvous_tcp`], and `PeerLost` when the connection to rank 0 fails or breaks.
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
    let server = (&*server.ip().to_string(), server.port());
    fetch(server, true, rank, world_size, address, &access.into(), &limits.into())
}

/// The exchange on a rank other than 0. `must_listen`: the server listens already, so that a failed connection means
/// that it is lost.
fn fetch(
    (host, port): (&str, u16),
    must_listen: bool,
    rank: usize,
    world_size: usize,
    address: &[u8],
    access: &Access<'_>,
    limits: &Limits,
) -> Result<Vec<Vec<u8>>> {
    let deadline = Deadline::after(limits.timeout);
    let what = format!("the rendezvous at {host}:{port}");
    limits.awaited.found_by(|| vec![0]);
    let mut server = Server::new((host, port), access, rank, deadline.left())?;
    let retries = |why: &Failed| matches!(why, Failed::Broken { .. });
    // A server that has ended the connection had too many, or has ended itself: the next attempt shows which.
    let retries = if must_listen { Failed::ended_by_server } else { retries };
    loop {
        let store = match TcpStore::until(deadline, &server, retries)? {
            Ok(store) => store,
            Err(Failed::Refused(why)) => return Err(refusal(why, rank, world_size, &what)),
            Err(Failed::Tls(why)) => return Err(Error::other(format!("{what}: {why}"))),
            Err(why) if deadline.passed() => {
                let missing = MissingRanks::new(vec![0], String::new());
                return Err(missing.timed_out(limits.timeout, rank, format!("{what} ({why})")));
            }
            Err(why) => {
                let reason = format!("it no longer serves {what} ({why})");
                let (host, source) = (host.to_owned(), why.source());
                return Err(Error::PeerLost { rank: 0, host, reason, noticed_by: rank, progress: None, source });
            }
        };
        let exchange = Exchange {
            store: &store,
            is_kept: false,
            rank,
            world_size,
            address,
            deadline,
            limits,
            place: format!("{host}:{port}"),
            from: format!(" from {}", store.local_address()?),
            other: Default::default(),
            ended: Default::default(),
        };
        match exchange.run() {
            Err(why) if store.is_broken() && deadline.passed() => {
                let missing = MissingRanks::new(vec![0], String::new());
                return Err(missing.timed_out(limits.timeout, rank, format!("{what} ({why})")));
            }
            // Rank 0 served, so it is lost if it does not serve again.
            Err(_) if store.is_broken() => server.limit = limits.lost_after.min(deadline.left()),
            outcome => return outcome,
        }
    }
}

/// The error for a rank that the server refuses.
fn refusal(why: Refusal, rank: usize, world_size: usize, rendezvous: &str) -> Error {
    match why {
        Refusal::WorldSize => {
            Error::Mismatch(format!("rank {rank} has world size {world_size}, rank 0 has another ({rendezvous})"))
        }
        Refusal::Version(_) | Refusal::NeedsTls | Refusal::NoTls => Error::Mismatch(format!("{rendezvous}: {why}")),
        _ => Error::other(format!("{rendezvous}: {why}")),
    }
}

/// Rank 0's server of a rendezvous. It listens from its creation on, so that ranks that get its address can connect at
/// once.
#[derive(Debug)]
pub struct RendezvousServer {
    listener: TcpListener,
    /// Host and port, for error texts.
    name: String,
}

impl RendezvousServer {
    /// Listens at `address`; port 0 takes any free port. The caller must publish [`RendezvousServer::address`] to the
    /// other ranks.
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
    /// The errors of [`rendezvous_tcp`] on rank 0.
    pub fn serve<'a>(
        self,
        world_size: usize,
        address: &[u8],
        access: impl Into<Access<'a>>,
        limits: impl Into<Limits>,
    ) -> Result<Vec<Vec<u8>>> {
        check_arguments(0, world_size, address)?;
        let limits = &limits.into();
        let deadline = Deadline::after(limits.timeout);
        let store = StoreServer::of_world(self.listener, &access.into(), world_size)?;
        let exchange = Exchange {
            store: &store,
            is_kept: false,
            rank: 0,
            world_size,
            address,
            deadline,
            limits,
            place: self.name,
            from: String::new(),
            other: Default::default(),
            ended: Default::default(),
        };
        let outcome = exchange.run();
        if !store.wait_for_clients(LINGER) && outcome.is_ok() {
            // A rank that has not taken the addresses by the deadline reports a timeout itself. Without a thread, it
            // reports rank 0 as lost.
            let serve_on = move || store.wait_for_clients(deadline.left());
            let _ = std::thread::Builder::new().name("bagua-addresses".to_owned()).spawn(serve_on);
        }
        outcome
    }
}
