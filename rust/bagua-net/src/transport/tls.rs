//! A non-blocking stream over one TLS 1.3 connection (RFC 8446), and the session behind every encrypted connection.
//!
//! The session uses rustls without rustls's buffers (`rustls::unbuffered`), so that one system call moves several
//! records into or out of a socket. rustls's buffered connections read 4 KiB at a time.

use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::net::send;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus, WriteTraffic,
};
use rustls::{AlertDescription, CertificateError, ClientConfig, Error as Fault, InvalidMessage, ServerConfig};

use super::tcp::{prepare, retry};
use super::{Broken, Readiness, Transport};
use crate::platform;

/// Maximum plaintext of a record (RFC 8446, section 5.1).
const RECORD: usize = 16 << 10;

/// Maximum plaintext that is encrypted before it is sent.
const AT_ONCE: usize = 4 * RECORD;

/// Initial size of the buffer for received bytes. Control connections never need more.
const FIRST_BUFFER: usize = 8 << 10;

/// Maximum number of received bytes that are not decrypted. More than a record or a handshake message can have.
const BUFFER_LIMIT: usize = 128 << 10;

/// Possible first bytes of a record: change_cipher_spec, alert, handshake, application_data.
const CONTENT_TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// The reason why a TLS connection failed, as the source of an [`io::Error`]. A retry would fail as well.
#[derive(Debug)]
pub struct TlsFault(Fault);

impl TlsFault {
    /// Returns the text of the fault in an error of a session, or `None` if the connection itself broke.
    pub fn of(error: &io::Error) -> Option<String> {
        error.get_ref()?.downcast_ref::<TlsFault>().map(ToString::to_string)
    }
}

impl std::error::Error for TlsFault {}

impl std::fmt::Display for TlsFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            // The end that finds a key derived from another secret gets the first of these two errors from rustls. It
            // sends an alert, for which rustls returns the second error at the other end.
            Fault::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
            | Fault::AlertReceived(AlertDescription::AccessDenied) => {
                f.write_str("TLS: the other end has a different secret")
            }
            Fault::InvalidMessage(InvalidMessage::InvalidContentType) => {
                f.write_str("TLS: the other end does not use TLS (BAGUA_TLS), or bytes were altered in transit")
            }
            Fault::PeerIncompatible(why) => {
                write!(f, "TLS: one end authenticates with the secret, the other with a certificate ({why:?})")
            }
            Fault::AlertReceived(
                AlertDescription::HandshakeFailure
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::UnsupportedExtension
                | AlertDescription::CertificateRequired,
            ) => f.write_str(
                "TLS: the other end refused the connection: one end authenticates with the secret, the other with a \
                     certificate, or the kind of certificate is not supported",
            ),
            Fault::AlertReceived(why) => write!(f, "TLS: the other end refused the connection: {why:?}"),
            // Certificates may be long, and the error text is sent to other ranks.
            other => write!(f, "TLS: {:.300}", other.to_string()),
        }
    }
}

fn fault(error: Fault) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, TlsFault(error))
}

/// Bytes on their way between a socket and the caller.
#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// The bytes in use are `bytes[start..end]`.
    start: usize,
    end: usize,
}

impl Buffer {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn filled(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start >= self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Returns room for at least `count` bytes after those in use.
    fn room(&mut self, count: usize) -> &mut [u8] {
        if self.bytes.len() - self.end < count {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.bytes.len() - self.end < count {
                self.bytes.resize(self.end + count, 0);
            }
        }
        &mut self.bytes[self.end..]
    }

    fn append(&mut self, bytes: &[u8]) {
        self.room(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }
}

/// The destination of decrypted bytes.
struct Sink<'a> {
    into: &'a mut [u8],
    filled: usize,
    /// Bytes that do not fit into `into`.
    spill: &'a mut Buffer,
}

impl Sink<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let direct = bytes.len().min(self.into.len() - self.filled);
        self.into[self.filled..self.filled + direct].copy_from_slice(&bytes[..direct]);
        self.filled += direct;
        if direct < bytes.len() {
            self.spill.append(&bytes[direct..]);
        }
    }
}

/// The next step of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The session processed something, so check again.
    Again,
    /// The handshake needs more bytes from the peer.
    Blocked,
    /// The handshake is complete, and no received record is left.
    Ready,
    /// The peer will not send anything more.
    Closed,
}

enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// The action that [`Session`] takes once its handshake is complete and no received record is left.
enum Request<'a> {
    Nothing,
    Encrypt(&'a [u8]),
    Close,
}

/// One end of a TLS connection, without the socket.
pub struct Session {
    end: End,
    /// Bytes received from the socket but not decrypted.
    incoming: Buffer,
    /// Encrypted bytes that are not in the socket yet.
    outgoing: Buffer,
    /// Decrypted bytes that the caller has not read.
    plain: Buffer,
    /// Scratch memory for a record with bytes of both `head` and `body`.
    joined: Vec<u8>,
    /// True if one more byte is encrypted than the caller was told, see [`Session::write`].
    held: bool,
    /// True if the peer will not send anything more.
    closed: bool,
    /// True once a first record from the peer has been seen.
    is_tls: bool,
    /// Error that ended the session. After it, rustls is not called, because it would read the same bytes again.
    failed: Option<Fault>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = match self.end {
            End::Client(_) => "client",
            End::Server(_) => "server",
        };
        f.debug_struct("Session").field("end", &end).field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Session {
    /// Creates the session of the end that connects.
    ///
    /// # Errors
    /// Fails if the configuration cannot be used.
    pub fn client(config: &Arc<ClientConfig>) -> io::Result<Session> {
        // The name is neither checked nor sent. The server's key proves its identity.
        let name = ServerName::try_from("bagua").map_err(io::Error::other)?;
        UnbufferedClientConnection::new(Arc::clone(config), name)
            .map(|end| Session::new(End::Client(end)))
            .map_err(fault)
    }

    /// Creates the session of the end that accepts.
    ///
    /// # Errors
    /// Fails if the configuration cannot be used.
    pub fn server(config: &Arc<ServerConfig>) -> io::Result<Session> {
        UnbufferedServerConnection::new(Arc::clone(config)).map(|end| Session::new(End::Server(end))).map_err(fault)
    }

    fn new(end: End) -> Session {
        Session {
            end,
            incoming: Buffer::default(),
            outgoing: Buffer::default(),
            plain: Buffer::default(),
            joined: Vec::new(),
            held: false,
            closed: false,
            is_tls: false,
            failed: None,
        }
    }

    /// Makes progress with the handshake. Returns `None` once the handshake is complete and everything is sent, or the
    /// operation of the socket that would block. `recv` and `send` access the socket.
    ///
    /// # Errors
    /// [`TlsFault`] if the other end cannot be trusted or does not use TLS. The other end gets an alert if possible.
    /// Otherwise errors of the socket, or `UnexpectedEof` if it was closed.
    pub fn handshake(
        &mut self,
        mut recv: impl FnMut(&mut [u8]) -> io::Result<usize>,
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<Option<Blocked>> {
        loop {
            let advanced = self.advance(&mut [], Request::Nothing);
            if let Err(error) = advanced {
                // Send the alert to the other end, if possible.
                let _ = self.flush(&mut send);
                return Err(error);
            }
            if !self.flush(&mut send)? {
                return Ok(Some(Blocked::Sending));
            }
            match advanced?.0 {
                Next::Again => {}
                Next::Ready => return Ok(None),
                Next::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                Next::Blocked => match self.fill(&mut recv) {
                    Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed")),
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Some(Blocked::Receiving)),
                    Err(e) => return Err(e),
                },
            }
        }
    }

    /// Returns the first bytes received, if they are not a TLS record.
    pub fn received_in_clear(&mut self) -> Option<&[u8]> {
        if self.is_tls || self.incoming.is_empty() {
            return None;
        }
        Some(self.incoming.filled())
    }

    /// Reads decrypted bytes into `into`, which must not be empty. Returns their number, 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if there are none now, [`TlsFault`] for bytes that the peer did not send, and errors of the socket.
    pub fn read(&mut self, into: &mut [u8], mut recv: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let mut filled = 0;
        loop {
            let ready = self.plain.filled();
            let count = ready.len().min(into.len() - filled);
            into[filled..filled + count].copy_from_slice(&ready[..count]);
            self.plain.consume(count);
            filled += count;
            if filled == into.len() || (self.closed && filled > 0) {
                return Ok(filled);
            }
            if self.closed {
                return Ok(0);
            }
            let (next, count) = match self.advance(&mut into[filled..], Request::Nothing) {
                // Deliver the earlier bytes first. The next call fails again.
                Err(_) if filled > 0 => return Ok(filled),
                other => other?,
            };
            filled += count;
            if next == Next::Again || filled == into.len() {
                continue;
            }
            match self.fill(&mut recv) {
                Ok(0) => self.closed = true,
                Ok(_) => {}
                Err(_) if filled > 0 => return Ok(filled),
                Err(e) => return Err(e),
            }
        }
    }

    /// Encrypts and sends a prefix of `head` followed by `body`. Returns the length of that prefix: 0 if there is no
    /// room now. The next call must start with the bytes that were not sent.
    ///
    /// Records are sent whole, so the session keeps the part of a record that the socket does not take. Meanwhile, the
    /// last byte of that record does not count as sent. This keeps callers from believing that they are done while
    /// bytes are still waiting.
    ///
    /// # Errors
    /// Errors of the socket, and [`TlsFault`] after the connection failed.
    pub fn write(
        &mut self,
        head: &[u8],
        body: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if !self.flush(&mut send)? || head.len() + body.len() == 0 {
            return Ok(0);
        }
        let mut sent = usize::from(std::mem::take(&mut self.held));
        while sent < head.len() + body.len() {
            let head_left = &head[sent.min(head.len())..];
            let body_left = &body[sent.saturating_sub(head.len())..];
            let count = if head_left.is_empty() {
                let count = body_left.len().min(AT_ONCE);
                self.encrypt(&body_left[..count])?;
                count
            } else {
                let from_body = body_left.len().min(RECORD.saturating_sub(head_left.len()));
                let mut joined = std::mem::take(&mut self.joined);
                joined.clear();
                joined.extend_from_slice(head_left);
                joined.extend_from_slice(&body_left[..from_body]);
                let encrypted = self.encrypt(&joined);
                self.joined = joined;
                encrypted?;
                head_left.len() + from_body
            };
            sent += count;
            if !self.flush(&mut send)? {
                self.held = true;
                return Ok(sent - 1);
            }
        }
        Ok(sent)
    }

    /// Sends waiting bytes. Returns false if the socket would block.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn flush(&mut self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<bool> {
        while !self.outgoing.is_empty() {
            match send(self.outgoing.filled()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.outgoing.consume(count),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Queues the message that tells the peer that nothing more will be sent. The next [`Session::flush`] sends it.
    pub fn close(&mut self) {
        // A failed connection has no end to announce.
        while matches!(self.advance(&mut [], Request::Close), Ok((Next::Again, _))) {}
    }

    fn encrypt(&mut self, bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.advance(&mut [], Request::Encrypt(bytes))?.0 {
                Next::Ready => return Ok(()),
                Next::Again => {}
                Next::Closed | Next::Blocked => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
    }

    /// Receives more bytes. Returns their number, which is 0 at the end of the stream.
    fn fill(&mut self, mut recv: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let (used, len) = (self.incoming.end - self.incoming.start, self.incoming.bytes.len());
        // If the last read filled the buffer, read more at once.
        let len = if self.incoming.end == len { (2 * len).clamp(FIRST_BUFFER, BUFFER_LIMIT) } else { len };
        let wanted = len - used;
        if wanted == 0 {
            return Err(fault(Fault::General("a record or a message is longer than allowed".to_owned())));
        }
        let count = loop {
            match recv(self.incoming.room(wanted)) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.incoming.end += count;
        Ok(count)
    }

    /// Processes received records until there is a result. Returns the next step, and the bytes decrypted into `into`.
    fn advance(&mut self, into: &mut [u8], request: Request<'_>) -> io::Result<(Next, usize)> {
        if let Some(failed) = &self.failed {
            return Err(fault(failed.clone()));
        }
        let advanced = self.process(into, request);
        if let Err(failed) = &advanced {
            self.failed = Some(failed.clone());
            // Send what rustls has queued, so that the peer gets the alert, which is the last message in the queue.
            while self.wants_write() && self.process(&mut [], Request::Nothing).is_ok() {}
        }
        advanced.map_err(fault)
    }

    /// True if rustls has messages of its own to send.
    fn wants_write(&self) -> bool {
        match &self.end {
            End::Client(end) => end.wants_write(),
            End::Server(end) => end.wants_write(),
        }
    }

    fn process(&mut self, into: &mut [u8], request: Request<'_>) -> Result<(Next, usize), Fault> {
        if !self.is_tls {
            match self.incoming.filled().first() {
                Some(first) if !CONTENT_TYPES.contains(first) => {
                    return Err(InvalidMessage::InvalidContentType.into());
                }
                Some(_) => self.is_tls = true,
                None => {}
            }
        }
        let mut sink = Sink { into, filled: 0, spill: &mut self.plain };
        let incoming = &mut self.incoming.bytes[self.incoming.start..self.incoming.end];
        let (discard, next) = match &mut self.end {
            End::Client(end) => take(end.process_tls_records(incoming), &mut sink, &mut self.outgoing, request),
            End::Server(end) => take(end.process_tls_records(incoming), &mut sink, &mut self.outgoing, request),
        };
        let filled = sink.filled;
        self.incoming.consume(discard);
        let next = next?;
        self.closed |= next == Next::Closed;
        Ok((next, filled))
    }
}

/// The operation of the socket that cannot continue yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// No bytes have arrived from the peer.
    Receiving,
    /// The socket's send buffer is full.
    Sending,
}

/// Handles one status of a connection. Returns the number of bytes to discard, and the next step.
fn take<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    sink: &mut Sink<'_>,
    outgoing: &mut Buffer,
    request: Request<'_>,
) -> (usize, Result<Next, Fault>) {
    let UnbufferedStatus { mut discard, state } = status;
    let next = match state {
        Err(error) => Err(error),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                None => break Ok(Next::Again),
                Some(Err(error)) => break Err(error),
                Some(Ok(record)) => {
                    discard += record.discard;
                    sink.put(record.payload);
                }
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut message)) => loop {
            let room = outgoing.end;
            match message.encode(&mut outgoing.bytes[room..]) {
                Ok(count) => {
                    outgoing.end += count;
                    break Ok(Next::Again);
                }
                Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                    let _ = outgoing.room(required_size);
                }
                Err(EncodeError::AlreadyEncoded) => break Ok(Next::Again),
            }
        },
        Ok(ConnectionState::TransmitTlsData(transmit)) => {
            // The encoded message is already in the send buffer, so rustls may continue.
            transmit.done();
            Ok(Next::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Blocked),
        Ok(ConnectionState::WriteTraffic(traffic)) => grant(traffic, outgoing, request).map(|()| Next::Ready),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Next::Closed),
        // Early data is turned off, and later versions of rustls may have more states.
        Ok(_) => Err(Fault::General("unexpected state of the connection".to_owned())),
    };
    (discard, next)
}

/// Carries out the request of a ready connection.
fn grant<Data>(mut traffic: WriteTraffic<'_, Data>, outgoing: &mut Buffer, request: Request<'_>) -> Result<(), Fault> {
    loop {
        let room = outgoing.end;
        let written = match &request {
            Request::Nothing => return Ok(()),
            Request::Encrypt(bytes) => traffic.encrypt(bytes, &mut outgoing.bytes[room..]),
            Request::Close => traffic.queue_close_notify(&mut outgoing.bytes[room..]),
        };
        match written {
            Ok(count) => {
                outgoing.end += count;
                return Ok(());
            }
            Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) => {
                let _ = outgoing.room(required_size);
            }
            Err(EncryptError::EncryptExhausted) => return Err(Fault::EncryptError),
        }
    }
}

/// One TLS connection to a peer.
pub struct Tls {
    stream: Arc<TcpStream>,
    session: Session,
}

impl Tls {
    /// Name of the transport, as returned by [`Transport::name`].
    pub const NAME: &'static str = "tls";

    /// Creates a transport over a connection whose handshake is complete.
    ///
    /// # Errors
    /// Fails if a socket option cannot be set.
    pub fn new(stream: impl Into<Arc<TcpStream>>, session: Session) -> io::Result<Tls> {
        let stream = stream.into();
        prepare(&stream)?;
        Ok(Tls { stream, session })
    }
}

impl Transport for Tls {
    fn name(&self) -> &'static str {
        Tls::NAME
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken> {
        let Tls { stream, session } = self;
        retry(|| session.write(head, body, |bytes| Ok(send(&**stream, bytes, platform::NO_SIGNAL)?)))
    }

    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let Tls { stream, session } = self;
        retry(|| match session.read(into, |bytes| (&**stream).read(bytes)) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed")),
            other => other,
        })
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Descriptor(self.stream.as_fd())
    }

    fn is_wire(&self) -> bool {
        true
    }
}
