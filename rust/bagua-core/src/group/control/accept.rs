//! Taking connections: who is let in, and what becomes of them.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr as UnixAddress;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};

use super::super::connection::{ConnKey, ControlConn};
use super::super::fork::ForkFd;
use super::super::handshake::{self, Hello, Purpose, Refusal};
use super::super::{Config, TransportChoice, let_many_wait};
use super::Plane;
use crate::error::{Error, Result};
use crate::wait::lock;

/// The sockets that peers connect to.
pub(in super::super) struct Listeners {
    fork_fds: Vec<ForkFd>,
    tcp: std::net::TcpListener,
    unix: Option<std::os::unix::net::UnixListener>,
    /// Name of `unix` in the network namespace; empty without it.
    pub(in super::super) name: Vec<u8>,
}

impl Listeners {
    /// Opens them. Without a Unix socket, everything goes by TCP.
    pub(in super::super) fn open(config: &Config) -> Result<Listeners> {
        let at = config.listen;
        let failed = |e| Error::system(&format!("listening on {at}"), e);
        let tcp = std::net::TcpListener::bind(at).map_err(failed)?;
        let_many_wait(&tcp).map_err(failed)?;
        tcp.set_nonblocking(true).map_err(failed)?;
        let mut fork_fds = vec![ForkFd::new(&tcp)];
        let name = format!("bagua-{:032x}", u128::from_le_bytes(handshake::random()?)).into_bytes();
        let unix = match config.transport {
            TransportChoice::Auto => UnixAddress::from_abstract_name(&name)
                .and_then(|address| std::os::unix::net::UnixListener::bind_addr(&address))
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .ok(),
            TransportChoice::Tcp => None,
        };
        fork_fds.extend(unix.as_ref().map(ForkFd::new));
        let name = if unix.is_some() { name } else { Vec::new() };
        Ok(Listeners { fork_fds, tcp, unix, name })
    }

    /// Where peers find the TCP listener.
    pub(in super::super) fn tcp_address(&self) -> Result<std::net::SocketAddr> {
        self.tcp.local_addr().map_err(|e| Error::system("the address of the listening socket", e))
    }
}

/// Accepts until the thread ends.
pub(super) async fn accept(plane: Arc<Plane>, listeners: Listeners) {
    let Listeners { fork_fds: _marks, tcp, unix, .. } = listeners;
    // Both only fail when the runtime is shutting down: then nobody is to be accepted either.
    let Ok(tcp) = TcpListener::from_std(tcp) else { return };
    let unix = unix.and_then(|unix| UnixListener::from_std(unix).ok());
    loop {
        let arrived = tokio::select! {
            conn = tcp.accept() => conn.and_then(|(stream, _)| ControlConn::tcp(stream)),
            conn = async { match &unix {
                Some(unix) => unix.accept().await,
                None => std::future::pending().await,
            } } => conn.map(|(stream, _)| ControlConn::unix(stream)),
        };
        match arrived {
            Ok(conn) => {
                let limit = 256 + 4 * plane.config.world_size;
                if plane.strangers.load(Ordering::Relaxed) >= limit {
                    plane.stats.connections_refused.fetch_add(1, Ordering::Relaxed);
                } else {
                    plane.strangers.fetch_add(1, Ordering::Relaxed);
                    tokio::spawn(serve(Arc::clone(&plane), conn));
                }
            }
            // Out of descriptors, or the client is gone again. The former passes when connections close.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// One connection, from hello to its place.
async fn serve(plane: Arc<Plane>, mut conn: ControlConn) {
    let outcome = examine(&plane, &mut conn).await;
    plane.strangers.fetch_sub(1, Ordering::Relaxed);
    let outcome = match outcome {
        Ok(hello) => match handshake::welcome(&mut conn.socket).await {
            Ok(()) => seat(&plane, hello, conn),
            Err(_) => Err(Refusal::Stranger),
        },
        Err(why) => {
            handshake::refuse(&mut conn.socket, why).await;
            Err(why)
        }
    };
    if outcome.is_err() {
        plane.stats.connections_refused.fetch_add(1, Ordering::Relaxed);
    }
}

async fn examine(plane: &Plane, conn: &mut ControlConn) -> std::result::Result<Hello, Refusal> {
    let greeted = handshake::greet(&mut conn.socket).await?;
    let Hello { world_size, from, to, purpose, job, .. } = greeted.hello;
    let own = plane.config.rank;
    if world_size != plane.config.world_size {
        return Err(Refusal::WorldSize);
    }
    // The higher rank connects to the lower, always.
    if to != own || from <= own || from >= world_size {
        return Err(Refusal::Rank);
    }
    // An honest peer may be faster than this rank, which does not know the key yet.
    if plane.opened.subscribe().wait_for(|open| *open).await.is_err() {
        return Err(Refusal::Stranger);
    }
    let book = plane.book().map_err(|_| Refusal::Stranger)?;
    if job != book.job {
        return Err(Refusal::Job);
    }
    handshake::prove(&mut conn.socket, &greeted, &book.key).await?;
    match purpose {
        Purpose::Control if plane.peers.get().is_some() => Err(Refusal::Duplicate),
        Purpose::Stream | Purpose::Segment if !plane.room.has_room() => Err(Refusal::Busy),
        Purpose::Rendezvous => Err(Refusal::Purpose),
        Purpose::Control | Purpose::Stream | Purpose::Segment => Ok(greeted.hello),
    }
}

fn seat(plane: &Plane, hello: Hello, conn: ControlConn) -> std::result::Result<(), Refusal> {
    if hello.purpose == Purpose::Control {
        // A second one, while the group is being built, is from a peer that gave the first up.
        lock(&plane.building).conns.insert(hello.from, conn);
        plane.built.notify_all();
        return Ok(());
    }
    let data_conn = conn.into_plain().map_err(|_| Refusal::Stranger)?;
    plane.room.enter(ConnKey::from(&hello), data_conn)
}
