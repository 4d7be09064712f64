//! The server: accepts connections, authenticates each, and gives it to a [`Service`].
//!
//! The control plane, the rendezvous, the store and joining each have a service. This file has the rules that all
//! services share: a limit on unauthenticated connections (`admission`), the order of the steps of TLS and of the
//! handshake, and the reason that a refused client gets.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::admission::{Admission, Candidate};
use super::connection::{AsyncSocket, ControlConn};
use super::fork::OwnerProcess;
use super::handshake::{self, ReceivedHello, Refusal};
use super::listen::Listener;
use super::tls::{Ends, Refused};
use crate::error::{Error, Result};

/// Pause after `accept` failed.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The result of accepting a connection, or the reason why it is refused.
pub(super) type Accepted<T> = std::result::Result<T, Refusal>;

/// The behaviour of a server towards its connections.
pub(super) trait Service: Send + Sync + 'static {
    /// The identity of an authenticated client.
    type Client: Send;

    /// Returns the ends of the server's TLS connections, or `None` without TLS.
    fn tls(&self) -> Option<&Ends>;

    /// Checks a client's hello, and by [`handshake::authenticate`] that the client knows the secret.
    fn authenticate(
        &self,
        received: ReceivedHello,
        socket: &mut AsyncSocket,
    ) -> impl Future<Output = Accepted<Self::Client>> + Send;

    /// Serves an authenticated client. Implementations must first tell the client so, by [`handshake::accept`].
    fn serve(self: Arc<Self>, client: Self::Client, conn: ControlConn) -> impl Future<Output = Accepted<()>> + Send;

    /// Called when a connection was refused.
    fn refused(&self, _refused: &Refused) {}
}

/// Serves until `until` completes. Returns the output of `until`, and the tasks of open connections, which end when
/// they are dropped.
pub(super) async fn serve<S: Service, T>(
    service: &Arc<S>,
    listener: Listener,
    admission: &Arc<Admission>,
    until: impl Future<Output = T>,
) -> (T, JoinSet<()>) {
    let Listener { fork_fds: _fork_fds, tcp, unix } = listener;
    // These conversions fail only while the runtime shuts down.
    let tcp = TcpListener::from_std(tcp).ok();
    let unix = unix.and_then(|unix| UnixListener::from_std(unix).ok());
    let mut connections = JoinSet::new();
    let mut until = std::pin::pin!(until);
    loop {
        tokio::select! {
            done = &mut until => return (done, connections),
            (conn, candidate) = next(admission, tcp.as_ref(), unix.as_ref()) => {
                _ = connections.spawn(serve_one(Arc::clone(service), conn, candidate));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Accepts a connection once there is a place for it.
async fn next(
    admission: &Arc<Admission>,
    tcp: Option<&TcpListener>,
    unix: Option<&UnixListener>,
) -> (ControlConn, Candidate) {
    loop {
        admission.place().await;
        let arrived = tokio::select! {
            conn = async { match tcp {
                Some(tcp) => tcp.accept().await,
                None => std::future::pending().await,
            } } => conn.and_then(|(stream, from)| Ok((ControlConn::tcp(stream)?, Some(from)))),
            conn = async { match unix {
                Some(unix) => unix.accept().await,
                None => std::future::pending().await,
            } } => conn.and_then(|(stream, _)| Ok((ControlConn::unix(stream)?, None))),
        };
        match arrived {
            Ok((conn, from)) => return (conn, admission.enter(from)),
            // The client has closed the connection already, or the process has no free descriptor. Retry: meanwhile the
            // client waits, and it connects again after a timeout.
            Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
        }
    }
}

/// Authenticates one connection, and serves it or refuses it.
async fn serve_one<S: Service>(service: Arc<S>, conn: ControlConn, candidate: Candidate) {
    let (client, conn) = match candidate.prove(authenticate(&*service, conn, &candidate)).await {
        Some(Ok(proved)) => proved,
        Some(Err((refused, conn))) => {
            service.refused(&refused);
            if let Some(mut conn) = conn {
                // Another connection may take the place of this one meanwhile.
                candidate.prove(handshake::refuse(&mut conn.socket, refused.why)).await;
            }
            return;
        }
        None => return service.refused(&Refusal::Busy.into()),
    };
    drop(candidate);
    if let Err(why) = Arc::clone(&service).serve(client, conn).await {
        service.refused(&why.into());
    }
}

/// Authenticates a client. Returns the client, or the reason why its connection does not belong to the job, with the
/// connection if the client must still get that answer.
async fn authenticate<S: Service>(
    service: &S,
    conn: ControlConn,
    candidate: &Candidate,
) -> std::result::Result<(S::Client, ControlConn), (Refused, Option<ControlConn>)> {
    let mut conn = conn.accept(service.tls()).await.map_err(|refused| (refused, None))?;
    let outcome = match candidate.read_hello(&mut conn.socket).await {
        Ok(received) => service.authenticate(received, &mut conn.socket).await,
        Err(why) => Err(why),
    };
    match outcome {
        Ok(client) => Ok((client, conn)),
        Err(why) => Err((why.into(), Some(conn))),
    }
}

/// A server with its own thread. Dropping this value ends the thread.
pub(super) struct Server {
    owner: OwnerProcess,
    stop: mpsc::UnboundedSender<()>,
    /// `None` only while this value is dropped.
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Starts a server. `places` is the maximum number of unauthenticated connections at a time.
    pub(super) fn start(name: &str, service: Arc<impl Service>, listener: Listener, places: usize) -> Result<Server> {
        let failed = |e| Error::system(&format!("starting the thread {name}"), e);
        let owner = OwnerProcess::install()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, mut stopped) = mpsc::unbounded_channel();
        let body = move || {
            let admission = Admission::new(places);
            drop(runtime.block_on(serve(&service, listener, &admission, stopped.recv())));
            // Closes the connections whose tasks have ended.
            drop(runtime);
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(failed)?;
        Ok(Server { owner, stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if !self.owner.is_current() {
            // In a forked child, the thread belongs to the parent and cannot be joined.
            std::mem::forget(thread);
            return;
        }
        let _ = self.stop.send(());
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}
