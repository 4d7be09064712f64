//! The listening sockets of a rank, and the service behind them: the checks of a hello, and where an accepted
//! connection goes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::config::{Config, TransportChoice};
use super::super::connection::{AsyncSocket, ConnKey, ControlConn};
use super::super::handshake::{self, Hello, Purpose, ReceivedHello, Refusal};
use super::super::listen::{Listener, listen};
use super::super::serve::{Accepted, Service};
use super::super::tls::{Ends, Refused};
use super::shared::Plane;
use super::world::unix_name;
use crate::error::{Error, Result};
use crate::platform;
use crate::wait::lock;

/// The listening sockets of a rank.
pub(in super::super) struct Listeners {
    pub(super) sockets: Listener,
    /// Abstract name of the Unix socket; empty without it.
    pub(in super::super) name: Vec<u8>,
}

impl Listeners {
    /// Opens the sockets. When the Unix socket cannot be opened, all connections use TCP.
    pub(in super::super) fn open(config: &Config) -> Result<Listeners> {
        let name = unix_name(handshake::random()?);
        Listeners::open_at(config.listen, config.transport, |_| name)
    }

    /// Opens the sockets at an address; the name of the Unix socket follows from the port of the other.
    pub(in super::super) fn open_at(
        at: SocketAddr,
        transport: TransportChoice,
        name: impl FnOnce(u16) -> Vec<u8>,
    ) -> Result<Listeners> {
        let failed = |e| Error::system(&format!("listening on {at}"), e);
        let tcp = listen(at).map_err(failed)?;
        let name = name(tcp.local_addr().map_err(failed)?.port());
        let unix = if transport.shares_memory() {
            platform::listen_by_name(&name).and_then(|listener| listener.set_nonblocking(true).map(|()| listener)).ok()
        } else {
            None
        };
        let name = if unix.is_some() { name } else { Vec::new() };
        Ok(Listeners { sockets: Listener::new(tcp, unix), name })
    }

    /// Address of the TCP listener.
    pub(in super::super) fn tcp_address(&self) -> Result<SocketAddr> {
        self.sockets.tcp.local_addr().map_err(|e| Error::system("the address of the listening socket", e))
    }
}

impl Service for Plane {
    type Client = Hello;

    fn tls(&self) -> Option<&Ends> {
        self.tls.as_ref()
    }

    async fn authenticate(&self, received: ReceivedHello, socket: &mut AsyncSocket) -> Accepted<Hello> {
        let Hello { world_size, from, to, purpose, job, .. } = received.hello;
        let own = self.config.rank;
        if world_size != self.config.world_size {
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
            let is_other = self.world().is_ok_and(|world| world.job != job);
            return if is_other { Err(Refusal::Job) } else { Ok(received.hello) };
        }
        // A peer may connect before this rank has all addresses, and with them the key.
        if self.world_known.subscribe().wait_for(|known| *known).await.is_err() {
            return Err(Refusal::Protocol);
        }
        let world = self.world().map_err(|_| Refusal::Protocol)?;
        if job != world.job {
            return Err(Refusal::Job);
        }
        handshake::authenticate(socket, &received, &world.key).await?;
        match purpose {
            Purpose::Join | Purpose::Store | Purpose::Probe => return Err(Refusal::Purpose),
            Purpose::Stream | Purpose::Segment | Purpose::Messages if !self.pending.has_room() => {
                return Err(Refusal::Busy);
            }
            Purpose::Stream | Purpose::Segment | Purpose::Messages | Purpose::Control => {}
        }
        Ok(received.hello)
    }

    /// Gives a control connection to the task of this rank; keeps any other one until its lane is opened.
    async fn serve(self: Arc<Self>, hello: Hello, mut conn: ControlConn) -> Accepted<()> {
        handshake::accept(&mut conn.socket).await.map_err(|_| Refusal::Protocol)?;
        match hello.purpose {
            // `handshake::accept` was the answer to a probe.
            Purpose::Probe => Ok(()),
            Purpose::Control => {
                conn.expedite();
                let handle = self.handle.get().ok_or(Refusal::Protocol)?;
                handle.accepted(hello.from, conn);
                Ok(())
            }
            _ => {
                let data_conn = conn.into_data().map_err(|_| Refusal::Protocol)?;
                self.pending.insert(ConnKey::from(&hello), data_conn)
            }
        }
    }

    fn refused(&self, Refused { why, text }: &Refused) {
        let explains = matches!(why, Refusal::Secret | Refusal::NoTls);
        if let Some(text) = text.clone().or_else(|| explains.then(|| why.to_string())) {
            lock(&self.connecting).last_refusal = Some(text);
        }
        self.stats.connections_refused.fetch_add(1, Ordering::Relaxed);
    }
}
