//! Bytes of a TCP connection that the peer's kernel does not have yet.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::net::TcpStream;
use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// Bytes that were sent on a connection and that the peer has not acknowledged; 0 where the kernel does not say.
pub fn unsent(stream: &TcpStream) -> usize {
    const OUTQ: Opcode = libc::TIOCOUTQ as Opcode;
    // SAFETY: on a socket, this request writes one int (tcp(7), SIOCOUTQ).
    let bytes = unsafe { ioctl(stream.as_fd(), Getter::<OUTQ, c_int>::new()) };
    bytes.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn bytes_count_until_the_peer_has_room_for_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        assert_eq!(unsent(&own), 0);
        own.set_nonblocking(true).unwrap();
        let block = vec![1; 1 << 20];
        let mut sent = 0;
        while let Ok(count) = own.write(&block) {
            sent += count;
        }
        assert!(unsent(&own) > 0, "{sent} bytes fill both buffers");
        let mut taken = vec![0; sent];
        peer.read_exact(&mut taken).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while unsent(&own) > 0 {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
}
