//! A stream over one TLS 1.3 connection (RFC 8446), non-blocking, and the session behind it, which every encrypted connection has.
//!
//! The session is rustls's without buffers of its own (`rustls::unbuffered`): several records go into a socket with one system call, and
//! come out of it with one. rustls's buffered connections read 4 KiB at a time.

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

/// The longest plaintext of a record (RFC 8446, section 5.1).
const RECORD: usize = 16 << 10;

/// The most plaintext that is encrypted before it is sent.
const AT_ONCE: usize = 4 * RECORD;

/// The size of a buffer of received bytes at first. Control connections never need more.
const FIRST_BUFFER: usize = 8 << 10;

/// The most received bytes that are not decrypted yet: more than a record, and more than a handshake message may have.
const BUFFER_LIMIT: usize = 128 << 10;

/// The first byte of a record: change_cipher_spec, alert, handshake, application_data.
const CONTENT_TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// Why a TLS connection failed, as the source of an [`io::Error`]. Another attempt would fail as well.
#[derive(Debug)]
pub struct TlsFault(Fault);

impl TlsFault {
    /// The text of the fault in an error of a session; `None` when the connection itself broke.
    pub fn of(error: &io::Error) -> Option<String> {
        error.get_ref()?.downcast_ref::<TlsFault>().map(ToString::to_string)
    }
}

impl std::error::Error for TlsFault {}

impl std::fmt::Display for TlsFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            // What the check of a key that is derived from the secret returns, and the alert that the other end gets for it.
            Fault::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
            | Fault::AlertReceived(AlertDescription::AccessDenied) => f.write_str("TLS: the other end has another secret"),
            Fault::InvalidMessage(InvalidMessage::InvalidContentType) => {
                f.write_str("TLS: the other end does not use TLS (BAGUA_TLS), or bytes were changed on the line")
            }
            Fault::PeerIncompatible(why) => {
                write!(f, "TLS: one end proves itself by the secret, the other by a certificate ({why:?})")
            }
            Fault::AlertReceived(
                AlertDescription::HandshakeFailure
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::UnsupportedExtension
                | AlertDescription::CertificateRequired,
            ) => {
                f.write_str("TLS: refused: one end proves itself by the secret, the other by a certificate, or its kind is not supported")
            }
            Fault::AlertReceived(why) => write!(f, "TLS: the other end refuses the connection: {why:?}"),
            // Certificates may be long, and an error text goes to other ranks.
            other => write!(f, "TLS: {:.300}", other.to_string()),
        }
    }
}

fn fault(error: Fault) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, TlsFault(error))
}

/// Bytes between a socket and the caller.
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

    /// Room for at least `count` bytes behind those in use.
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

/// Where decrypted bytes go.
struct Sink<'a> {
    into: &'a mut [u8],
    /// Bytes of `into` that are filled.
    filled: usize,
    /// What does not fit into `into`.
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

/// What a session can do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Something was processed: look again.
    Again,
    /// The handshake needs more bytes from the peer.
    Blocked,
    /// The handshake is complete, and no received record is left.
    Ready,
    /// The peer will send nothing more.
    Closed,
}

/// Which end of the connection this is.
enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What to do when the session is ready.
enum Request<'a> {
    Nothing,
    Encrypt(&'a [u8]),
    Close,
}

/// One end of a TLS connection, without the socket.
pub struct Session {
    end: End,
    /// Received from the socket, not decrypted.
    incoming: Buffer,
    /// Encrypted, not in the socket.
    outgoing: Buffer,
    /// Decrypted, not read by the caller.
    plain: Buffer,
    /// Scratch for a record that has bytes of `head` and of `body`.
    joined: Vec<u8>,
    /// One byte more than the caller knows of is encrypted: see [`Session::write`].
    held: bool,
    /// The peer will send nothing more.
    closed: bool,
    /// A first record from the peer has been seen.
    is_tls: bool,
    /// What went wrong: rustls is not called any more, because it would process the same bytes again.
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
    /// The end that connects.
    ///
    /// # Errors
    /// When the configuration cannot be used.
    pub fn client(config: &Arc<ClientConfig>) -> io::Result<Session> {
        // Not checked and not sent: who the server is, its key says.
        let name = ServerName::try_from("bagua").map_err(io::Error::other)?;
        UnbufferedClientConnection::new(Arc::clone(config), name)
            .map(|end| Session::new(End::Client(end)))
            .map_err(fault)
    }

    /// The end that accepts.
    ///
    /// # Errors
    /// When the configuration cannot be used.
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

    /// Makes progress with the handshake; true when it is complete and everything is sent, false when the socket would block. `recv` and
    /// `send` are the socket's.
    ///
    /// # Errors
    /// [`TlsFault`] when the other end cannot be trusted or does not use TLS; the other end gets an alert, if possible. Otherwise errors
    /// of the socket, `UnexpectedEof` when it was closed.
    pub fn handshake(
        &mut self,
        mut recv: impl FnMut(&mut [u8]) -> io::Result<usize>,
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<Option<Blocked>> {
        loop {
            let advanced = self.advance(&mut [], Request::Nothing);
            if let Err(error) = advanced {
                // The alert for the other end; best effort.
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

    /// The first bytes that came, when they are no record of TLS.
    pub fn received_in_clear(&mut self) -> Option<&[u8]> {
        if self.is_tls || self.incoming.is_empty() {
            return None;
        }
        Some(self.incoming.filled())
    }

    /// Reads decrypted bytes, and returns their number, 0 at the end of the stream. `into` is not empty.
    ///
    /// # Errors
    /// `WouldBlock` when there are none now; [`TlsFault`] for bytes that the peer has not sent so; errors of the socket.
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
                // What came before is delivered first; the next call fails again.
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

    /// Encrypts and sends a prefix of `head` followed by `body`, and returns its length; 0 when there is no room now.
    ///
    /// A record is sent whole, and the part of it that the socket does not take waits here. So that no caller believes to be done while
    /// bytes wait, the last byte of a record counts as sent only when the whole record is in the socket: the next call must begin with the
    /// bytes that were not sent.
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

    /// Sends what waits; false when the socket would block.
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

    /// Announces to the peer that nothing more will be sent, with the next [`Session::flush`].
    pub fn close(&mut self) {
        // A connection that failed has no end to announce.
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

    /// Receives more bytes; their number, 0 at the end of the stream.
    fn fill(&mut self, mut recv: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        let (used, len) = (self.incoming.end - self.incoming.start, self.incoming.bytes.len());
        // A read that filled the buffer is followed by a longer one.
        let len = if self.incoming.end == len { (2 * len).clamp(FIRST_BUFFER, BUFFER_LIMIT) } else { len };
        let wanted = len - used;
        if wanted == 0 {
            return Err(fault(Fault::General("a record or a message beyond its limit".to_owned())));
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

    /// Processes received records until something comes of it; what to do next, and the bytes that were decrypted into `into`.
    fn advance(&mut self, into: &mut [u8], request: Request<'_>) -> io::Result<(Next, usize)> {
        if let Some(failed) = &self.failed {
            return Err(fault(failed.clone()));
        }
        let advanced = self.process(into, request);
        if let Err(failed) = &advanced {
            self.failed = Some(failed.clone());
            // Messages that wait to be encoded, of which the last is the alert, come before any processing.
            while self.wants_write() && self.process(&mut [], Request::Nothing).is_ok() {}
        }
        advanced.map_err(fault)
    }

    /// True when rustls has messages of its own to send.
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

/// What a handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// Bytes from the peer.
    Receiving,
    /// Room in the socket.
    Sending,
}

/// Handles one status of a connection: the bytes to discard, and what to do next.
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
            // It is in the buffer before everything that follows.
            transmit.done();
            Ok(Next::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Blocked),
        Ok(ConnectionState::WriteTraffic(traffic)) => grant(traffic, outgoing, request).map(|()| Next::Ready),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Next::Closed),
        // Early data is off; and there may be further states in later versions of rustls.
        Ok(_) => Err(Fault::General("a state of the connection that is not expected".to_owned())),
    };
    (discard, next)
}

/// Runs the request of a ready connection.
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
    /// See [`Transport::name`].
    pub const NAME: &'static str = "tls";

    /// A transport over a connection whose handshake is complete.
    ///
    /// # Errors
    /// When a socket option cannot be set.
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
        // NOSIGNAL: as in `Tcp`.
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
