//! An asynchronous TCP connection with a TLS session.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::transport::tls::{Blocked, Session};

/// A TLS connection of the control thread, or of a rendezvous.
#[derive(Debug)]
pub(in super::super) struct TlsSocket {
    stream: TcpStream,
    session: Box<Session>,
    /// True once the end of the stream was announced.
    ended: bool,
}

impl TlsSocket {
    pub(in super::super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(super) fn new(stream: TcpStream, session: Session) -> TlsSocket {
        TlsSocket { stream, session: Box::new(session), ended: false }
    }

    /// Runs the handshake. If it fails, sends the other end the reason, as far as TLS has an alert for it.
    pub(super) async fn handshake(&mut self) -> io::Result<()> {
        loop {
            let TlsSocket { stream, session, .. } = self;
            match session.handshake(|into| stream.try_read(into), |from| stream.try_write(from)) {
                Ok(None) => return Ok(()),
                Ok(Some(Blocked::Receiving)) => stream.readable().await?,
                Ok(Some(Blocked::Sending)) => stream.writable().await?,
                Err(error) => {
                    // The alert may have to wait: tokio does not try to write before it knows that the socket has room.
                    let _ = poll_fn(|cx| self.poll_sent(cx)).await;
                    return Err(error);
                }
            }
        }
    }

    /// See [`Session::received_in_clear`].
    pub(super) fn received_in_clear(&mut self) -> Option<&[u8]> {
        self.session.received_in_clear()
    }

    pub(in super::super) fn into_parts(self) -> (TcpStream, Box<Session>) {
        (self.stream, self.session)
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let TlsSocket { stream, session, .. } = self;
        while !session.flush(|from| stream.try_write(from))? {
            ready!(stream.poll_write_ready(cx))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for TlsSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let TlsSocket { stream, session, .. } = &mut *self;
        if into.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            match session.read(into.initialize_unfilled(), |bytes| stream.try_read(bytes)) {
                Ok(count) => {
                    into.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready!(stream.poll_read_ready(cx))?,
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for TlsSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let TlsSocket { stream, session, .. } = &mut *self;
        loop {
            match session.write(from, &[], |bytes| stream.try_write(bytes))? {
                0 if !from.is_empty() => ready!(stream.poll_write_ready(cx))?,
                count => return Poll::Ready(Ok(count)),
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_sent(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ended {
            self.ended = true;
            self.session.close();
        }
        ready!(self.poll_sent(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
