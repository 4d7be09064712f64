//! Accepting connections: the listening sockets, the server's end of the handshake, and where an accepted connection goes.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr as UnixAddress;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};

use super::super::admission::Candidate;
use super::super::config::{Config, TransportChoice};
use super::super::connection::{ConnKey, ControlConn};
use super::super::fork::ForkFd;
use super::super::handshake::{self, Hello, Purpose, Refusal};
use super::super::listen::raise_backlog;
use super::plane::Plane;
use super::session;
use crate::error::{Error, Result};
use crate::wait::lock;

/// The listening sockets of a rank.
pub(in super::super) struct Listeners {
    fork_fds: Vec<ForkFd>,
    tcp: std::net::TcpListener,
    unix: Option<std::os::unix::net::UnixListener>,
    /// Abstract name of `unix`; empty without it.
    pub(in super::super) name: Vec<u8>,
}

impl Listeners {
    /// Opens the sockets. When the Unix socket cannot be opened, all connections use TCP.
    pub(in super::super) fn open(config: &Config) -> Result<Listeners> {
        let at = config.listen;
        let failed = |e| Error::system(&format!("listening on {at}"), e);
        let tcp = std::net::TcpListener::bind(at).map_err(failed)?;
        raise_backlog(&tcp).map_err(failed)?;
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

    /// Address of the TCP listener.
    pub(in super::super) fn tcp_address(&self) -> Result<std::net::SocketAddr> {
        self.tcp.local_addr().map_err(|e| Error::system("the address of the listening socket", e))
    }
}

/// Accepts connections until the thread ends.
pub(super) async fn accept(plane: Arc<Plane>, listeners: Listeners) {
    let Listeners { fork_fds: _fork_fds, tcp, unix, .. } = listeners;
    // Both fail only while the runtime shuts down.
    let Ok(tcp) = TcpListener::from_std(tcp) else { return };
    let unix = unix.and_then(|unix| UnixListener::from_std(unix).ok());
    loop {
        plane.admission.place().await;
        let arrived = tokio::select! {
            conn = tcp.accept() => conn.and_then(|(stream, from)| Ok((ControlConn::tcp(stream)?, Some(from)))),
            conn = async { match &unix {
                Some(unix) => unix.accept().await,
                None => std::future::pending().await,
            } } => conn.map(|(stream, _)| (ControlConn::unix(stream), None)),
        };
        match arrived {
            Ok((conn, from)) => {
                let candidate = plane.admission.enter(from);
                tokio::spawn(serve(Arc::clone(&plane), conn, candidate));
            }
            // The client has closed the connection already, or the process has no free descriptor: retry.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Authenticates one connection and hands it over.
async fn serve(plane: Arc<Plane>, conn: ControlConn, candidate: Candidate) {
    let proved = candidate.prove(prove(&plane, conn, &candidate)).await;
    drop(candidate);
    let outcome = match proved {
        // A probe has its answer.
        Some(Ok(None)) => return,
        Some(Ok(Some((hello, mut conn)))) => match handshake::accept(&mut conn.socket).await {
            Ok(()) => hand_over(&plane, hello, conn),
            Err(_) => Err(Refusal::Protocol),
        },
        Some(Err(why)) => Err(why),
        None => Err(Refusal::Busy),
    };
    if outcome.is_err() {
        plane.stats.connections_refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// A connection whose client has proved that it belongs to the job, and its hello; `None` for a probe, which is answered; any other one is
/// refused.
async fn prove(
    plane: &Plane,
    conn: ControlConn,
    candidate: &Candidate,
) -> std::result::Result<Option<(Hello, ControlConn)>, Refusal> {
    let mut conn = conn.accept(plane.tls.as_ref()).await.map_err(|refused| {
        if refused.text.is_some() {
            lock(&plane.connecting).last_refusal = refused.text;
        }
        refused.why
    })?;
    let outcome = authenticate(plane, &mut conn, candidate).await;
    if let Err(why @ (Refusal::Secret | Refusal::NoTls)) = outcome {
        lock(&plane.connecting).last_refusal = Some(why.to_string());
    }
    match outcome {
        Ok(hello) if hello.purpose == Purpose::Probe => {
            handshake::accept(&mut conn.socket).await.map_err(|_| Refusal::Protocol)?;
            Ok(None)
        }
        Ok(hello) => Ok(Some((hello, conn))),
        Err(why) => {
            handshake::refuse(&mut conn.socket, why).await;
            Err(why)
        }
    }
}

/// The hello of a connection that passes all checks.
async fn authenticate(
    plane: &Plane,
    conn: &mut ControlConn,
    candidate: &Candidate,
) -> std::result::Result<Hello, Refusal> {
    let received = candidate.read_hello(&mut conn.socket).await?;
    let Hello { world_size, from, to, purpose, job, .. } = received.hello;
    let own = plane.config.rank;
    if world_size != plane.config.world_size {
        return Err(Refusal::WorldSize);
    }
    // The higher rank always connects to the lower one, except for messages, where the sender connects.
    let wrong_end = match purpose {
        Purpose::Messages | Purpose::Probe => from == own,
        _ => from <= own,
    };
    if to != own || wrong_end || from >= world_size {
        return Err(Refusal::Rank);
    }
    if purpose == Purpose::Probe {
        let is_other = plane.world().is_ok_and(|world| world.job != job);
        return if is_other { Err(Refusal::Job) } else { Ok(received.hello) };
    }
    // A peer may connect before this rank has all addresses, and with them the key.
    if plane.world_known.subscribe().wait_for(|known| *known).await.is_err() {
        return Err(Refusal::Protocol);
    }
    let world = plane.world().map_err(|_| Refusal::Protocol)?;
    if job != world.job {
        return Err(Refusal::Job);
    }
    handshake::authenticate(&mut conn.socket, &received, &world.key).await?;
    match purpose {
        Purpose::Stream | Purpose::Segment | Purpose::Messages if !plane.pending.has_room() => Err(Refusal::Busy),
        Purpose::Rendezvous | Purpose::Door | Purpose::Book | Purpose::Probe => Err(Refusal::Purpose),
        Purpose::Control | Purpose::Stream | Purpose::Segment | Purpose::Messages => Ok(received.hello),
    }
}

/// Begins the session of an accepted control connection; keeps any other one until its lane is opened.
fn hand_over(plane: &Arc<Plane>, hello: Hello, conn: ControlConn) -> std::result::Result<(), Refusal> {
    if hello.purpose == Purpose::Control {
        return if session::start(plane, hello.from, conn) { Ok(()) } else { Err(Refusal::Duplicate) };
    }
    let data_conn = conn.into_data().map_err(|_| Refusal::Protocol)?;
    plane.pending.insert(ConnKey::from(&hello), data_conn)
}
