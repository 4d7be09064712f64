//! The server of a store.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

use super::super::connection::{AsyncSocket, ControlConn};
use super::super::handshake::{self, Hello, Key, Purpose, ReceivedHello, Refusal};
use super::super::listen::{BACKLOG, Listener};
use super::super::serve::{Accepted, Server, Service};
use super::super::tls::{Access, Ends, Refused};
use super::super::wire::{Encoding, VERSION, read_frame};
use super::message::{Reply, Request};
use super::{ENDED, FRAME_LIMIT, REFUSED, STRANGER, Store, key, no_number, sum};
use crate::error::{Error, Result};
use crate::wait::{Deadline, lock, wait_on_for};

/// The most connections at a time that are not authenticated.
const PLACES: usize = 256;

/// The most bytes of all keys and values.
const STORE_LIMIT: usize = 64 << 20;

/// The longest file of values: each `set` makes it longer.
const KEPT_LIMIT: u64 = 4 * STORE_LIMIT as u64;

/// First bytes of a file of values, before the version of the protocol that encodes them.
const MAGIC: [u8; 4] = *b"BGbk";

/// Number of the connection that claims a key. 0 stands for the process that runs the server.
type Client = u64;

/// The server of a store, and that store without a connection. Ends when it is dropped.
pub struct StoreServer {
    address: SocketAddr,
    // Dropped first: it serves what is shared.
    _server: Server,
    shared: Arc<StoreService>,
}

/// The state that the connections share.
struct StoreService {
    key: Key,
    /// The ends of its TLS connections; `None` without TLS.
    tls: Option<Ends>,
    values: Mutex<Values>,
    /// Notified after every change of the values.
    changed: Condvar,
    /// Clients with a lower rank are noted when they are refused.
    ranks: usize,
}

#[derive(Default)]
struct Values {
    by_key: BTreeMap<String, Vec<u8>>,
    /// The client that claimed each key.
    claims: BTreeMap<String, Client>,
    /// The client that connected last.
    last_client: Client,
    /// By key without a value: the clients that wait for a value. Dropping the sender wakes them.
    awaited: HashMap<String, watch::Sender<()>>,
    /// The reply with the value for which a client waited last, because many wait for the same one.
    reply: Option<(String, Arc<Vec<u8>>)>,
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
                format!("it is not a file of a store, or has {of} of the protocol; this server runs version {VERSION}");
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
    fn answer(&mut self, request: Request, client: Client) -> Reply {
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
            Request::Claim(key, value) => {
                match self.by_key.get(&key) {
                    Some(found) if *found != value => return Reply::Value(found.clone()),
                    // The client may have connected again before its first connection has ended.
                    Some(_) => {}
                    None => {
                        if let full @ Reply::Full = self.set(key.clone(), value.clone()) {
                            return full;
                        }
                    }
                }
                self.remove(&format!("{ENDED}{key}"));
                self.claims.insert(key, client);
                Reply::Value(value)
            }
            Request::Remove(key) => {
                self.remove(&key);
                Reply::Nothing
            }
            Request::Keys(prefix) => {
                let keys = self.by_key.range(prefix.clone()..).map(|(key, _)| key);
                Reply::Keys(keys.take_while(|key| key.starts_with(&prefix)).cloned().collect())
            }
            // Clients wait in `StoreService::wait`. The server's own process gets an answer without waiting.
            Request::Wait(key, _) => self.answer(Request::Get(key), client),
        }
    }

    fn remove(&mut self, key: &str) -> Option<Vec<u8>> {
        self.claims.remove(key);
        let value = self.by_key.remove(key)?;
        self.bytes -= key.len() + value.len();
        self.reply.take_if(|(of, _)| of == key);
        Some(value)
    }

    /// Removes what a client claimed, because its connection has ended.
    fn end(&mut self, client: Client) {
        let claimed: Vec<_> = self.claims.iter().filter(|(_, by)| **by == client).map(|(key, _)| key.clone()).collect();
        for key in claimed {
            if let Some(value) = self.remove(&key) {
                self.set(format!("{ENDED}{key}"), value);
            }
        }
    }

    /// The reply with the value of a key; without a value what ends when there is one.
    fn reply_or_wait(&mut self, key: &str) -> std::result::Result<Arc<Vec<u8>>, watch::Receiver<()>> {
        if let Some((_, reply)) = self.reply.as_ref().filter(|(of, _)| of == key) {
            return Ok(Arc::clone(reply));
        }
        let Some(value) = self.by_key.get(key) else {
            return Err(self.awaited.entry(key.to_owned()).or_insert_with(|| watch::Sender::new(())).subscribe());
        };
        let reply = Arc::new(Reply::Value(value.clone()).frame());
        self.reply = Some((key.to_owned(), Arc::clone(&reply)));
        Ok(reply)
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
        self.reply.take_if(|(of, _)| *of == key);
        self.awaited.remove(&key);
        self.by_key.insert(key, value.clone());
        Reply::Value(value)
    }
}

impl StoreServer {
    /// Listens on a host and a port, 0 for any free one, and serves; without a host on every address. With a file, the
    /// values are kept in it for a later server.
    ///
    /// # Errors
    /// `System` when it cannot listen there, or the file cannot be read or written; `InvalidArgument` for TLS without a
    /// secret or certificates.
    pub fn start(host: &str, port: u16, access: &Access<'_>, kept_in: Option<&Path>) -> Result<StoreServer> {
        let listener = listen(host, port).map_err(|e| Error::system(&format!("listening on {host}:{port}"), e))?;
        let unreadable = |path: &Path, e| Error::system(&format!("keeping the store in {}", path.display()), e);
        let values = kept_in.map(|path| Values::kept_in(path).map_err(|e| unreadable(path, e))).transpose()?;
        StoreServer::serve(listener, access, values.unwrap_or_default(), 0)
    }

    /// Serves on a listening socket, to the ranks of a world and others.
    ///
    /// # Errors
    /// The errors of [`StoreServer::start`].
    pub(in super::super) fn of_world(
        listener: TcpListener,
        access: &Access<'_>,
        world_size: usize,
    ) -> Result<StoreServer> {
        StoreServer::serve(listener, access, Values::default(), world_size)
    }

    fn serve(listener: TcpListener, access: &Access<'_>, values: Values, ranks: usize) -> Result<StoreServer> {
        let tls = Ends::of(access)?;
        let address = listener.local_addr().map_err(|e| Error::system("the address of a store", e))?;
        let (key, values) = (key(access.secret), Mutex::new(values));
        let shared = Arc::new(StoreService { key, tls, values, changed: Condvar::new(), ranks });
        let listener = Listener::new(listener, None);
        let server = Server::start("bagua-store", Arc::clone(&shared), listener, ranks + PLACES)?;
        Ok(StoreServer { address, _server: server, shared })
    }

    /// Waits until all clients that claimed something have closed their connections, for at most `limit`. True if they
    /// have.
    pub(in super::super) fn wait_for_clients(&self, limit: Duration) -> bool {
        let (deadline, StoreService { values, changed, .. }) = (Deadline::after(limit), &*self.shared);
        let mut values = lock(values);
        while values.claims.values().any(|client| *client > 0) && !deadline.passed() {
            values = wait_on_for(changed, values, deadline.left());
        }
        values.claims.values().all(|client| *client == 0)
    }

    fn ask(&self, request: Request) -> Result<Option<Vec<u8>>> {
        let key = request.key().to_owned();
        match self.shared.with(|values| values.answer(request, 0)) {
            Reply::Value(value) => Ok(Some(value)),
            Reply::Nothing | Reply::Keys(_) => Ok(None),
            Reply::Full => Err(Error::other("the store is full")),
            Reply::NoNumber => Err(no_number(&key)),
        }
    }

    /// The address at which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Store for StoreServer {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(Request::Set(key.to_owned(), value.to_vec())).map(drop)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.ask(Request::Get(key.to_owned()))
    }

    fn set_new(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.ask(Request::SetNew(key.to_owned(), value.to_vec())).map(Option::unwrap_or_default)
    }

    fn claim(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.ask(Request::Claim(key.to_owned(), value.to_vec())).map(Option::unwrap_or_default)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.ask(Request::Remove(key.to_owned())).map(drop)
    }

    fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        match self.shared.with(|values| values.answer(Request::Keys(prefix.to_owned()), 0)) {
            Reply::Keys(keys) => Ok(keys),
            other => unreachable!("{other:?} to a question for keys"),
        }
    }

    fn find(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = Deadline::after(limit);
        let mut values = lock(&self.shared.values);
        loop {
            let found = values.by_key.get(key).cloned();
            if found.is_some() || deadline.passed() {
                return Ok(found);
            }
            values = wait_on_for(&self.shared.changed, values, deadline.left());
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        sum(self.ask(Request::Add(key.to_owned(), amount))?.as_deref(), 0).ok_or_else(|| no_number(key))
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
        let Hello { purpose, from, .. } = received.hello;
        if purpose != Purpose::Store {
            return Err(Refusal::Purpose);
        }
        let outcome = handshake::authenticate(socket, &received, &self.key).await;
        // The rank is not authenticated here. The note is only for the error text, and there is one per rank at most.
        if outcome.is_err() && from < self.ranks {
            self.note(format!("{REFUSED}{from}"), "it does not have this rank's secret");
        }
        outcome
    }

    /// Answers a client's requests until it ends.
    async fn serve(self: Arc<Self>, (): (), mut conn: ControlConn) -> std::result::Result<(), Refusal> {
        handshake::accept(&mut conn.socket).await.map_err(|_| Refusal::Protocol)?;
        let client = self.with(|values| {
            values.last_client += 1;
            values.last_client
        });
        while let Ok(body) = read_frame(&mut conn.socket, FRAME_LIMIT).await
            && let Ok(request) = Request::parse(&body)
        {
            let reply = match request {
                Request::Wait(key, millis) => self.wait(&key, Duration::from_millis(millis), &mut conn.socket).await,
                request => Some(Arc::new(self.with(|values| values.answer(request, client)).frame())),
            };
            let Some(reply) = reply else { break };
            if conn.socket.write_all(&reply).await.is_err() {
                break;
            }
        }
        self.with(|values| values.end(client));
        Ok(())
    }

    fn refused(&self, Refused { why, text }: &Refused) {
        let explains = *why == Refusal::NoTls;
        if self.ranks > 0
            && let Some(text) = text.clone().or_else(|| explains.then(|| why.to_string()))
        {
            self.note(STRANGER.to_owned(), &text);
        }
    }
}

impl StoreService {
    /// Reads or changes the values.
    fn with<T>(&self, change: impl FnOnce(&mut Values) -> T) -> T {
        let outcome = change(&mut lock(&self.values));
        self.changed.notify_all();
        outcome
    }

    fn note(&self, key: String, why: &str) {
        self.with(|values| values.set(key, why.as_bytes().to_vec()));
    }

    /// The reply to a client that waits for a value; `None` if it ends meanwhile.
    async fn wait(&self, key: &str, limit: Duration, socket: &mut AsyncSocket) -> Option<Arc<Vec<u8>>> {
        let until_found = async {
            loop {
                let waiting = lock(&self.values).reply_or_wait(key);
                match waiting {
                    Ok(reply) => return reply,
                    Err(mut set) => _ = set.changed().await,
                }
            }
        };
        let found = tokio::select! {
            found = tokio::time::timeout(limit, until_found) => found,
            // A client that waits sends nothing.
            _ = socket.read_u8() => return None,
        };
        if found.is_err() {
            lock(&self.values).awaited.retain(|_, set| set.receiver_count() > 0);
        }
        Some(found.unwrap_or_else(|_| Arc::new(Reply::Nothing.frame())))
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
        // Use an address on which no other socket takes the port between the two servers.
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
