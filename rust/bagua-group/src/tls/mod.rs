//! TLS 1.3 on every TCP connection of a group: authentication of both ends, and the two handshakes.
//!
//! Both ends prove that they have a key. With the secret, it is one Ed25519 key pair that every holder of the secret
//! derives from it, sent as a raw public key (RFC 7250), because rustls has no pre-shared keys. With certificates, it
//! is the key of a certificate that the job's CA has signed. Names in certificates are not checked, because ranks are
//! found by address, so the CA must sign for this job only. The handshake of [`handshake`](super::handshake) follows
//! inside TLS.
//!
//! | file | what it is |
//! |---|---|
//! | `credentials` | the keys, and their checks |
//! | `socket` | an asynchronous socket with a session |

mod credentials;
mod socket;

use std::io::{self, Read, Write};
use std::net::TcpStream as StdStream;
use std::sync::Arc;

use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};
use tokio::net::TcpStream;

pub use credentials::Tls;
pub(super) use socket::TlsSocket;

use super::handshake::{self, Failed, Refusal, STEP_TIMEOUT};
use crate::error::{Error, Result};
use crate::transport;
use crate::transport::tls::{Session, TlsFault};
use credentials::Credentials;

/// The means by which a process proves that it belongs to a job.
#[derive(Clone, Copy, Debug, Default)]
pub struct Access<'a> {
    /// The job's secret.
    pub secret: &'a [u8],
    /// Encryption of the job's connections; `None` for plain TCP.
    pub tls: Option<&'a Tls>,
}

impl<'a, T: AsRef<[u8]> + ?Sized> From<&'a T> for Access<'a> {
    fn from(secret: &'a T) -> Access<'a> {
        Access { secret: secret.as_ref(), tls: None }
    }
}

/// Both ends of the TLS connections of a job.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Ends {
    /// Returns the ends for a job, or `None` without TLS. Fails with `InvalidArgument` without a secret or
    /// certificates.
    pub(super) fn of(access: &Access<'_>) -> Result<Option<Ends>> {
        access.tls.map(|tls| Ends::new(&tls.credentials(access.secret)?)).transpose()
    }

    fn new(credentials: &Credentials) -> Result<Ends> {
        let failed = |e: rustls::Error| Error::other(format!("TLS: {e}"));
        let provider = credentials.provider();
        let mut client = ClientConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .dangerous()
            .with_custom_certificate_verifier(credentials.server_verifier())
            .with_client_cert_resolver(credentials.client_resolver());
        client.resumption = rustls::client::Resumption::disabled();
        client.enable_sni = false;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .with_client_cert_verifier(credentials.client_verifier())
            .with_cert_resolver(credentials.server_resolver());
        // No session is resumed, so that every connection proves both keys.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        Ok(Ends { client: Arc::new(client), server: Arc::new(server) })
    }

    /// Makes the client's end of a new connection. The caller limits the time.
    pub(super) async fn connect(&self, stream: TcpStream) -> std::result::Result<TlsSocket, Failed> {
        let mut socket = TlsSocket::new(stream, Session::client(&self.client)?);
        socket.handshake().await.map_err(Failed::from)?;
        Ok(socket)
    }

    /// Makes the server's end of a new connection, within [`STEP_TIMEOUT`].
    pub(super) async fn accept(&self, stream: TcpStream) -> std::result::Result<TlsSocket, Refused> {
        let session = Session::server(&self.server).map_err(|_| Refusal::Protocol)?;
        let mut socket = TlsSocket::new(stream, session);
        match tokio::time::timeout(STEP_TIMEOUT, socket.handshake()).await {
            Ok(Ok(())) => Ok(socket),
            Ok(Err(error)) => {
                let in_clear = socket.received_in_clear().is_some_and(handshake::is_hello);
                let (mut stream, _) = socket.into_parts();
                if in_clear {
                    handshake::refuse(&mut stream, Refusal::NeedsTls).await;
                    return Err(Refused { why: Refusal::NeedsTls, text: Some(Refusal::NeedsTls.to_string()) });
                }
                handshake::dismiss(&mut stream).await;
                Err(Refused { why: Refusal::Protocol, text: TlsFault::of(&error) })
            }
            Err(_) => Err(Refusal::Protocol.into()),
        }
    }
}

/// Makes both ends of a TLS connection over two connected sockets, for tests and benchmarks.
///
/// # Errors
/// `InvalidArgument` without a secret or certificates. `System` if the handshake fails.
pub fn tls_pair(access: &Access<'_>, sockets: (StdStream, StdStream)) -> Result<(transport::Tls, transport::Tls)> {
    let failed = |e: io::Error| Error::system("a TLS connection within this process", e);
    let ends = Ends::of(access)?.ok_or_else(|| Error::InvalidArgument("no TLS".to_owned()))?;
    let (client, server) = sockets;
    let mut sessions = (Session::client(&ends.client).map_err(failed)?, Session::server(&ends.server).map_err(failed)?);
    client.set_nonblocking(true).map_err(failed)?;
    server.set_nonblocking(true).map_err(failed)?;
    loop {
        let step = |session: &mut Session, mut read: &StdStream, mut write: &StdStream| {
            session.handshake(|into| read.read(into), |from| write.write(from)).map_err(failed)
        };
        let first = step(&mut sessions.0, &client, &client)?;
        if step(&mut sessions.1, &server, &server)?.or(first).is_none() {
            let client = transport::Tls::new(client, sessions.0).map_err(failed)?;
            return Ok((client, transport::Tls::new(server, sessions.1).map_err(failed)?));
        }
    }
}

/// A connection that a server refuses.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) why: Refusal,
    /// Text that may explain to a user why a rank did not join.
    pub(super) text: Option<String>,
}

impl From<Refusal> for Refused {
    fn from(why: Refusal) -> Refused {
        Refused { why, text: None }
    }
}
