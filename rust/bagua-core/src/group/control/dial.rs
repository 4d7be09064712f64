//! Making connections, with retries until a deadline.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpStream, UnixStream};

use super::super::TransportChoice;
use super::super::address::Address;
use super::super::connection::{ControlConn, DataConn};
use super::super::handshake::{self, Failed, Hello, Purpose, Refusal, STEP};
use super::{Control, Plane};
use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::wait::lock;

/// A connection to make.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Dial {
    /// World rank of the peer.
    pub(in super::super) to: usize,
    pub(in super::super) purpose: Purpose,
    pub(in super::super) group: u64,
    pub(in super::super) channel: u32,
    pub(in super::super) index: u32,
}

/// Which way an attempt goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Unix,
    Tcp,
}

impl Plane {
    fn hello(&self, dial: &Dial) -> Result<Hello> {
        let Dial { to, purpose, group, channel, index } = *dial;
        let (world_size, from, job) = (self.config.world_size, self.config.rank, self.book()?.job);
        Ok(Hello { world_size, from, to, purpose, group, channel, index, job })
    }

    /// True when a Unix socket is worth an attempt.
    fn may_be_near(&self, address: &Address) -> Result<bool> {
        let own = &self.book()?.addresses[self.config.rank];
        let auto = self.config.transport == TransportChoice::Auto;
        Ok(auto && !address.unix.is_empty() && !own.unix.is_empty() && address.host_id == own.host_id)
    }

    async fn attempt(&self, address: &Address, way: Way, hello: &Hello) -> std::result::Result<ControlConn, Failed> {
        let mut conn = match (way, address.tcp) {
            (Way::Unix, _) => {
                let mut name = vec![0];
                name.extend_from_slice(&address.unix);
                use std::os::unix::ffi::OsStringExt;
                ControlConn::unix(UnixStream::connect(PathBuf::from(std::ffi::OsString::from_vec(name))).await?)
            }
            (Way::Tcp, Some(tcp)) => {
                let connecting = tokio::time::timeout(STEP, TcpStream::connect(tcp)).await;
                ControlConn::tcp(connecting.map_err(|_| Failed::broken("no answer"))??)?
            }
            (Way::Tcp, None) => return Err(Failed::broken("it has no TCP address")),
        };
        let key = &self.book().map_err(|e| Failed::broken(e.to_string()))?.key;
        handshake::introduce(&mut conn.socket, hello, key).await?;
        Ok(conn)
    }

    /// Attempts until one succeeds or is refused. `trouble` hears of every failure. Never returns otherwise: the caller
    /// limits the time.
    async fn dial(
        &self,
        dial: &Dial,
        mut way: Way,
        mut trouble: impl FnMut(String),
    ) -> std::result::Result<ControlConn, Refusal> {
        let (Ok(hello), Ok(book)) = (self.hello(dial), self.book()) else { return Err(Refusal::Job) };
        let address = &book.addresses[dial.to];
        let mut pause = Duration::from_millis(5);
        loop {
            match self.attempt(address, way, &hello).await {
                Ok(conn) => return Ok(conn),
                Err(Failed::Refused(why)) => return Err(why),
                Err(Failed::Broken { how, .. }) => {
                    trouble(how);
                    // The peer listened before it told its name: a name that is not there is in another namespace.
                    if way == Way::Unix && dial.purpose == Purpose::Control && self.is_elsewhere(address).await {
                        way = Way::Tcp;
                        continue;
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    async fn is_elsewhere(&self, address: &Address) -> bool {
        let mut name = vec![0];
        name.extend_from_slice(&address.unix);
        use std::os::unix::ffi::OsStringExt;
        match UnixStream::connect(PathBuf::from(std::ffi::OsString::from_vec(name))).await {
            Ok(_) => false,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        }
    }
}

impl Control {
    /// Begins to connect the control plane to a lower rank, until `deadline`. The conn appears in `building`; a refusal
    /// fails the world.
    pub(in super::super) fn dial_control(&self, to: usize, deadline: Instant, health: &Arc<GroupHealth>) -> Result<()> {
        let book = self.plane.book()?;
        let dial = Dial { to, purpose: Purpose::Control, group: book.world, channel: 0, index: 0 };
        let way = if self.plane.may_be_near(&book.addresses[to])? { Way::Unix } else { Way::Tcp };
        let place = book.addresses[to].place();
        let (plane, health) = (Arc::clone(&self.plane), Arc::clone(health));
        self.spawn(async move {
            let trouble = |how| _ = lock(&plane.building).troubles.insert(to, how);
            match tokio::time::timeout_at(deadline.into(), plane.dial(&dial, way, trouble)).await {
                Ok(Ok(conn)) => _ = lock(&plane.building).conns.insert(to, conn),
                Ok(Err(why)) => {
                    let text = format!("{place}: {why}");
                    let error = match why {
                        Refusal::Version | Refusal::WorldSize | Refusal::Job => Error::Mismatch(text),
                        Refusal::Stranger
                        | Refusal::Rank
                        | Refusal::Secret
                        | Refusal::Purpose
                        | Refusal::Busy
                        | Refusal::Duplicate => Error::other(text),
                    };
                    let _ = health.fail(error);
                }
                // Whoever waits for the conn has the same deadline, and names who is missing.
                Err(_) => {}
            }
            plane.built.notify_all();
        });
        Ok(())
    }

    /// Begins to connect for a lane. The answer comes through the receiver; it is disconnected when the time is over.
    pub(in super::super) fn dial_lane(
        &self,
        dial: Dial,
        deadline: Instant,
    ) -> std::sync::mpsc::Receiver<std::result::Result<DataConn, String>> {
        let (answer, receiver) = std::sync::mpsc::channel();
        let plane = Arc::clone(&self.plane);
        self.spawn(async move {
            let way = if dial.purpose == Purpose::Segment { Way::Unix } else { Way::Tcp };
            if let Ok(made) = tokio::time::timeout_at(deadline.into(), plane.dial(&dial, way, |_| ())).await {
                let made = made.map_err(|why| why.to_string());
                let _ = answer.send(made.and_then(|conn| conn.into_plain().map_err(|e| e.to_string())));
            }
        });
        receiver
    }
}
