//! The server of a store.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use socket2::{Domain, Socket, Type};
use tokio::io::AsyncWriteExt;

use super::super::connection::{AsyncSocket, ControlConn};
use super::super::handshake::{self, Key, Purpose, ReceivedHello, Refusal};
use super::super::listen::{BACKLOG, Listener};
use super::super::serve::{Accepted, Server, Service};
use super::super::tls::{Access, Ends};
use super::super::wire::{Encoding, VERSION, read_frame};
use super::message::{Reply, Request};
use super::{FRAME_LIMIT, key, sum};
use crate::error::{Error, Result};
use crate::wait::lock;

/// The most connections at a time that are not authenticated.
const PLACES: usize = 256;

/// The most bytes of all keys and values.
const STORE_LIMIT: usize = 64 << 20;

/// The longest file of values: each `set` makes it longer.
const KEPT_LIMIT: u64 = 4 * STORE_LIMIT as u64;

/// First bytes of a file of values, before the version of the protocol that encodes them.
const MAGIC: [u8; 4] = *b"BGbk";

/// The server of a store. Ends when it is dropped.
pub struct StoreServer {
    address: SocketAddr,
    _server: Server,
}

/// What the connections share.
struct StoreService {
    key: Key,
    /// The ends of its TLS connections; `None` without TLS.
    tls: Option<Ends>,
    values: Mutex<Values>,
}

#[derive(Default)]
struct Values {
    by_key: HashMap<String, Vec<u8>>,
    /// Bytes of all keys and values.
    bytes: usize,
    /// The file with each `set` as a frame, if the values outlive the server, and its length.
    kept: Option<(File, u64)>,
}

impl Values {
    /// The values in a file of an earlier server, which gets those that are set from now on; the file may be missing.
    fn kept_in(path: &Path) -> std::io::Result<Values> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut all = Vec::new();
        Read::by_ref(&mut file).take(KEPT_LIMIT).read_to_end(&mut all)?;
        let head = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        // The server may have ended before it had written all of it.
        if all.len() < head.len() && head.starts_with(&all) {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&head)?;
            all = head.clone();
        }
        let Some(mut rest) = all.strip_prefix(&*head) else {
            let theirs = all.strip_prefix(&MAGIC).and_then(|rest| rest.first_chunk()).map(|it| u16::from_le_bytes(*it));
            let of = theirs.map_or_else(|| "version 6 or older".to_owned(), |theirs| format!("version {theirs}"));
            let why =
                format!("it is no file of a store, or one of {of} of the protocol; this server runs version {VERSION}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
        };
        let mut values = Values::default();
        while let Some((len, from)) = rest.split_first_chunk()
            && let Some((body, from)) = from.split_at_checked(u32::from_le_bytes(*len) as usize)
            && let Ok(Request::Set(key, value)) = Request::parse(body)
        {
            values.set(key, value);
            rest = from;
        }
        // The server may have ended within a write.
        let whole = (all.len() - rest.len()) as u64;
        file.set_len(whole)?;
        file.seek(SeekFrom::End(0))?;
        values.kept = Some((file, whole));
        Ok(values)
    }

    /// Handles a request.
    fn answer(&mut self, request: Request) -> Reply {
        match request {
            Request::Get(key) => self.by_key.get(&key).map_or(Reply::Nothing, |value| Reply::Value(value.clone())),
            Request::Set(key, value) => self.set(key, value),
            Request::SetNew(key, value) => match self.by_key.get(&key) {
                Some(found) => Reply::Value(found.clone()),
                None => self.set(key, value),
            },
            Request::Add(key, amount) => match sum(self.by_key.get(&key).map(Vec::as_slice), amount) {
                Some(sum) => self.set(key, sum.to_string().into_bytes()),
                None => Reply::NoNumber,
            },
        }
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> Reply {
        let before = self.by_key.get(&key).map_or(0, |before| key.len() + before.len());
        let bytes = self.bytes - before + key.len() + value.len();
        if bytes > STORE_LIMIT {
            return Reply::Full;
        }
        if let Some((file, len)) = &mut self.kept {
            let frame = Request::Set(key.clone(), value.clone()).frame();
            *len += frame.len() as u64;
            if *len > KEPT_LIMIT || file.write_all(&frame).is_err() {
                return Reply::Full;
            }
        }
        self.bytes = bytes;
        self.by_key.insert(key, value.clone());
        Reply::Value(value)
    }
}

impl StoreServer {
    /// Listens on a host and a port, 0 for any free one, and serves; without a host on every address. With a file, the values are kept in
    /// it for a later server.
    ///
    /// # Errors
    /// `System` when it cannot listen there, or the file cannot be read or written; `InvalidArgument` for TLS without a secret or certificates.
    pub fn start(host: &str, port: u16, access: &Access<'_>, kept_in: Option<&Path>) -> Result<StoreServer> {
        let tls = Ends::of(access)?;
        let failed = |e| Error::system(&format!("listening on {host}:{port}"), e);
        let listener = listen(host, port).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let unreadable = |path: &Path, e| Error::system(&format!("keeping the store in {}", path.display()), e);
        let values = kept_in.map(|path| Values::kept_in(path).map_err(|e| unreadable(path, e))).transpose()?;
        let shared = StoreService { key: key(access.secret), tls, values: Mutex::new(values.unwrap_or_default()) };
        let server = Server::start("bagua-store", Arc::new(shared), Listener::new(listener, None), PLACES)?;
        Ok(StoreServer { address, _server: server })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
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
        socket.set_nonblocking(true)?;
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

impl Service for StoreService {
    type Client = ();

    fn tls(&self) -> Option<&Ends> {
        self.tls.as_ref()
    }

    async fn authenticate(&self, received: ReceivedHello, socket: &mut AsyncSocket) -> Accepted<()> {
        if received.hello.purpose != Purpose::Store {
            return Err(Refusal::Purpose);
        }
        handshake::authenticate(socket, &received, &self.key).await
    }

    /// Answers a client's requests until it ends.
    async fn serve(self: Arc<Self>, (): (), mut conn: ControlConn) -> std::result::Result<(), Refusal> {
        handshake::accept(&mut conn.socket).await.map_err(|_| Refusal::Protocol)?;
        while let Ok(body) = read_frame(&mut conn.socket, FRAME_LIMIT).await
            && let Ok(request) = Request::parse(&body)
        {
            let reply = lock(&self.values).answer(request).frame();
            if conn.socket.write_all(&reply).await.is_err() {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::tests::own_host;
    use super::super::{Store, TcpStore};
    use super::*;

    #[test]
    fn values_outlive_a_server_that_ended_within_a_set_and_a_client_asks_the_next_one() {
        let path = std::env::temp_dir().join(format!("bagua-store-{}", std::process::id()));
        let access = Access::from(b"secret");
        // Where no other socket takes the port between two servers.
        let host = own_host();
        let start = |port| StoreServer::start(&host, port, &access, Some(&path)).unwrap();
        let server = start(0);
        let port = server.address().port();
        let store = TcpStore::connect(&host, port, &access, Duration::from_secs(30)).unwrap();
        for value in [b"first", b"other"] {
            store.set("rank-0", value).unwrap();
        }
        store.set_new("token", b"t").unwrap();
        drop(server);
        // A frame without its end.
        let mut torn = File::options().append(true).open(&path).unwrap();
        torn.write_all(&[200, 0, 0, 0, 1]).unwrap();
        for again in [b"third", b"forth"] {
            let _server = start(port);
            assert_eq!(store.set_new("token", b"another").unwrap(), b"t");
            assert_eq!(store.get("rank-0").unwrap().unwrap(), b"other");
            store.set(&String::from_utf8_lossy(again), again).unwrap();
        }
        let _server = start(port);
        assert_eq!(store.get("third").unwrap().unwrap(), b"third", "set after the frame without an end");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_of_another_version_is_refused_and_kept_and_one_that_was_just_begun_is_taken() {
        let path = std::env::temp_dir().join(format!("bagua-store-versions-{}", std::process::id()));
        let access = Access::from(b"secret");
        let start = || StoreServer::start("127.0.0.1", 0, &access, Some(&path)).map(drop);
        // As version 6 wrote it: a length, a kind, and a text after its length.
        let unnamed = [&[20, 0, 0, 0, 1, 6, 0, 0, 0][..], b"rank-0", &[5, 0, 0, 0], b"first"].concat();
        let later = [&MAGIC[..], &(VERSION + 1).to_le_bytes(), b"anything"].concat();
        for (old, named) in [(&unnamed, "version 6 or older"), (&later, &*format!("version {}", VERSION + 1))] {
            std::fs::write(&path, old).unwrap();
            let refused = start().unwrap_err().to_string();
            let ours = format!("this server runs version {VERSION}");
            assert!(refused.contains(named) && refused.contains(&ours), "{refused}");
            assert_eq!(std::fs::read(&path).unwrap(), *old, "it stays as it was");
        }
        for begun in 0..MAGIC.len() + size_of::<u16>() {
            std::fs::write(&path, &[&MAGIC[..], &VERSION.to_le_bytes()].concat()[..begun]).unwrap();
            start().unwrap();
            start().unwrap();
        }
        std::fs::remove_file(path).unwrap();
    }
}
