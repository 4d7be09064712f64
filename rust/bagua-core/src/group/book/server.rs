//! The server of a book.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::super::admission::{Admission, Candidate};
use super::super::connection::ControlConn;
use super::super::fork::{ForkFd, OwnerProcess};
use super::super::handshake::{self, Key, Purpose, Refusal};
use super::super::listen::{BACKLOG, raise_backlog};
use super::super::tls::{Access, Ends};
use super::super::wire::read_frame;
use super::message::{Reply, Request};
use super::{FRAME_LIMIT, key};
use crate::error::{Error, Result};
use crate::wait::lock;

/// The most connections at a time that are not authenticated.
const PLACES: usize = 256;

/// The most bytes of all entries.
const BOOK_LIMIT: usize = 64 << 20;

/// The server of an address book. Ends when it is dropped.
pub struct BookServer {
    address: SocketAddr,
    owner: OwnerProcess,
    stop: mpsc::UnboundedSender<()>,
    /// `None` only while it is dropped.
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What the connections share.
struct Shared {
    key: Key,
    /// The ends of its TLS connections; `None` without TLS.
    tls: Option<Ends>,
    entries: Mutex<Entries>,
    /// The connections that are not authenticated.
    admission: Arc<Admission>,
}

#[derive(Default)]
struct Entries {
    by_name: HashMap<String, Vec<u8>>,
    /// Bytes of all names and entries.
    bytes: usize,
}

impl Entries {
    /// Handles a request.
    fn answer(&mut self, request: Request) -> Reply {
        match request {
            Request::Read(name) => self.by_name.get(&name).map_or(Reply::Nothing, |entry| Reply::Entry(entry.clone())),
            Request::Write(name, entry) => self.write(name, entry),
            Request::Claim(name, entry) => match self.by_name.get(&name) {
                Some(found) => Reply::Entry(found.clone()),
                None => self.write(name, entry),
            },
        }
    }

    fn write(&mut self, name: String, entry: Vec<u8>) -> Reply {
        let before = self.by_name.get(&name).map_or(0, |before| name.len() + before.len());
        let bytes = self.bytes - before + name.len() + entry.len();
        if bytes > BOOK_LIMIT {
            return Reply::Full;
        }
        self.bytes = bytes;
        self.by_name.insert(name, entry.clone());
        Reply::Entry(entry)
    }
}

impl BookServer {
    /// Listens on a host and a port, 0 for any free one, and serves; without a host on every address.
    ///
    /// # Errors
    /// `System` when it cannot listen there; `InvalidArgument` for TLS without a secret or certificates.
    pub fn start(host: &str, port: u16, access: &Access<'_>) -> Result<BookServer> {
        let tls = Ends::of(access)?;
        let failed = |e| Error::system(&format!("listening on {host}:{port}"), e);
        let listener = listen(host, port).map_err(failed)?;
        raise_backlog(&listener).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let owner = OwnerProcess::install()?;
        let (entries, admission) = (Mutex::default(), Admission::new(PLACES));
        let shared = Arc::new(Shared { key: key(access.secret), tls, entries, admission });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::system("starting the book's thread", e))?;
        let (stop, mut stopped) = mpsc::unbounded_channel();
        let thread = std::thread::Builder::new()
            .name("bagua-book".to_owned())
            .spawn(move || {
                let fork_fd = ForkFd::new(&listener);
                runtime.block_on(async {
                    tokio::spawn(accept(shared, listener));
                    stopped.recv().await;
                });
                drop((runtime, fork_fd));
            })
            .map_err(|e| Error::system("starting the book's thread", e))?;
        Ok(BookServer { address, owner, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for BookServer {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if !self.owner.is_current() {
            // The thread is the parent's.
            std::mem::forget(thread);
            return;
        }
        let _ = self.stop.send(());
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// Listens; without a host on all IPv6 and IPv4 addresses, as far as the system has them.
fn listen(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let on = |at: SocketAddr, both: bool| {
        let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        if at.is_ipv6() {
            socket.set_only_v6(!both)?;
        }
        socket.bind(&at.into())?;
        socket.listen(BACKLOG)?;
        Ok(TcpListener::from(socket))
    };
    if !host.is_empty() {
        let at = (host, port).to_socket_addrs()?.next().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        return on(at, false);
    }
    let every: SocketAddr = (std::net::Ipv6Addr::UNSPECIFIED, port).into();
    match on(every, true) {
        // No IPv6 in this kernel, or switched off for all interfaces; any other reason holds for IPv4.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)) => {
            on((std::net::Ipv4Addr::UNSPECIFIED, port).into(), false)
        }
        other => other,
    }
}

/// Accepts clients until the thread ends.
async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    // Fails only while the runtime shuts down.
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    loop {
        let accepted = shared.admission.accept(&listener).await;
        match accepted.and_then(|(stream, candidate)| Ok((ControlConn::tcp(stream)?, candidate))) {
            Ok((conn, candidate)) => _ = tokio::spawn(serve(Arc::clone(&shared), conn, candidate)),
            // The client has gone already, or the process has no free descriptor: retry.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Authenticates a client and answers its requests until it ends.
async fn serve(shared: Arc<Shared>, conn: ControlConn, candidate: Candidate) {
    let Some(Ok(mut conn)) = candidate.prove(authenticate(&shared, conn, &candidate)).await else { return };
    drop(candidate);
    if handshake::accept(&mut conn.socket).await.is_err() {
        return;
    }
    while let Ok(body) = read_frame(&mut conn.socket, FRAME_LIMIT).await
        && let Ok(request) = Request::parse(&body)
    {
        let reply = lock(&shared.entries).answer(request).encode();
        let len = u32::try_from(reply.len()).unwrap_or(u32::MAX);
        let frame = [&len.to_le_bytes()[..], &reply].concat();
        if conn.socket.write_all(&frame).await.is_err() {
            return;
        }
    }
}

async fn authenticate(
    shared: &Shared,
    conn: ControlConn,
    candidate: &Candidate,
) -> std::result::Result<ControlConn, Refusal> {
    let mut conn = conn.accept(shared.tls.as_ref()).await.map_err(|refused| refused.why)?;
    let outcome = async {
        let received = candidate.read_hello(&mut conn.socket).await?;
        if received.hello.purpose != Purpose::Book {
            return Err(Refusal::Purpose);
        }
        handshake::authenticate(&mut conn.socket, &received, &shared.key).await
    };
    match outcome.await {
        Ok(()) => Ok(conn),
        Err(why) => {
            handshake::refuse(&mut conn.socket, why).await;
            Err(why)
        }
    }
}
