//! The handshake of a connection: both ends authenticate with the job's secret and agree on the connection's purpose.
//!
//! ```text
//! client  hello    magic, version, world size, from, to, purpose, group, channel, index, job, nonce     (fixed length)
//! server  answer   0, nonce, HMAC("server", hello, nonce)                                               or 1, code
//! client  proof    HMAC("client", hello, nonce)
//! server  result   0                                                                                    or 1, code
//! ```
//!
//! The server's version follows the code that refuses a version, so that the client's error names both.
//!
//! Both proofs cover the hello, so that its fields cannot be changed in transit. The two labels prevent the replay of
//! an answer as a proof. All messages have fixed lengths. Every step has a time limit.

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::wire::{Malformed, Reader, VERSION, Writer};
use crate::error::{self, Error, Source};
use crate::platform;
use crate::transport::tls::TlsFault;

/// Time limit of one step. A peer needs far less.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// First bytes of every connection.
const MAGIC: [u8; 8] = *b"BGhello\n";

/// First bytes of a TLS connection: a handshake record of version 3.1 or later.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// Length of a hello.
pub(super) const HELLO_LEN: usize = 8 + 2 + 4 + 4 + 4 + 1 + 8 + 4 + 4 + 8 + 32;

/// Maximum number of bytes that the server reads from a client whose connection it closes.
const DISMISSED: u64 = 64 << 10;

/// Answer byte that accepts the previous step.
const ACCEPTED: u8 = 0;

/// Answer byte that refuses the connection. The code of a [`Refusal`] follows.
const REFUSED: u8 = 1;

/// Returns random bytes from the operating system.
pub(super) fn random<const N: usize>() -> error::Result<[u8; N]> {
    let mut bytes = [0; N];
    platform::random(&mut bytes).map_err(|e| Error::system("random bytes of the system", e))?;
    Ok(bytes)
}

/// Returns the SHA-256 digest of some bytes.
pub(super) fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().into()
}

/// A key that is derived from the job's secret.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// Derives the key for a purpose.
    pub(super) fn new(secret: &[u8], purpose: &[u8]) -> Key {
        Key(hmac(secret, &[purpose]).finalize().into_bytes().into())
    }

    /// Derives the key of the TLS connections of a job with this secret.
    pub(super) fn of_tls(secret: &[u8]) -> Key {
        Key::new(secret, b"tls ed25519")
    }

    /// Returns the bytes of the key, to derive another key from them.
    pub(super) fn into_seed(self) -> [u8; 32] {
        self.0
    }

    /// Returns a number derived from the key. The number does not reveal the key.
    pub(super) fn number(&self, label: &[u8]) -> u64 {
        u64::from_le_bytes(*self.derived(&[label]).first_chunk().expect("32 bytes have a first 8"))
    }

    /// Returns bytes derived from the key. They do not reveal the key.
    pub(super) fn derived(&self, label: &[&[u8]]) -> [u8; 32] {
        hmac(&self.0, label).finalize().into_bytes().into()
    }

    /// Computes the proof of one side of a handshake.
    fn proof(&self, side: &[u8], hello: &[u8; HELLO_LEN], nonce: &[u8; 32]) -> Hmac<Sha256> {
        hmac(&self.0, &[side, hello, nonce])
    }
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum Purpose {
    /// Control messages.
    Control = 1,
    /// Data of a lane.
    Stream = 2,
    /// Passing a descriptor of shared memory.
    Segment = 3,
    /// Joining an elastic job.
    Join = 5,
    /// Requests to the server of a store, or of a rendezvous.
    Store = 6,
    /// Messages in one direction.
    Messages = 7,
    /// Asks if the rank runs. Needs no proof.
    Probe = 8,
}

/// The first message of a connection: the identity of the client and the purpose of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) world_size: usize,
    /// World rank of the client.
    pub(super) from: usize,
    /// World rank of the server.
    pub(super) to: usize,
    pub(super) purpose: Purpose,
    /// Id of the group.
    pub(super) group: u64,
    /// Number of the lane or of the arena in the group.
    pub(super) channel: u32,
    /// Distinguishes connections with the same purpose and channel.
    pub(super) index: u32,
    /// Distinguishes this job from earlier and later ones: the first bytes of the digest of all addresses.
    pub(super) job: [u8; 8],
}

impl Hello {
    pub(super) fn encode(&self, nonce: &[u8; 32]) -> [u8; HELLO_LEN] {
        let mut out = Writer::default();
        out.fixed(&MAGIC).u16(VERSION).rank(self.world_size).rank(self.from).rank(self.to).u8(self.purpose as u8);
        out.u64(self.group).u32(self.channel).u32(self.index).fixed(&self.job).fixed(nonce);
        out.0.try_into().expect("HELLO_LEN is the sum of the fields")
    }

    pub(super) fn parse(bytes: &[u8; HELLO_LEN]) -> Result<Hello, Refusal> {
        let mut from = Reader(bytes);
        if from.array() != Ok(MAGIC) {
            return Err(if bytes.starts_with(&TLS_HANDSHAKE) { Refusal::NoTls } else { Refusal::Protocol });
        }
        match from.u16() {
            Ok(VERSION) => {}
            Ok(theirs) => return Err(Refusal::Version(theirs)),
            Err(Malformed(_)) => return Err(Refusal::Protocol),
        }
        Hello::fields(&mut from).map_err(|Malformed(_)| Refusal::Purpose)
    }

    fn fields(from: &mut Reader<'_>) -> Result<Hello, Malformed> {
        let (world_size, rank, to) = (from.rank()?, from.rank()?, from.rank()?);
        let purpose = match from.u8()? {
            1 => Purpose::Control,
            2 => Purpose::Stream,
            3 => Purpose::Segment,
            5 => Purpose::Join,
            6 => Purpose::Store,
            7 => Purpose::Messages,
            8 => Purpose::Probe,
            _ => return Err(Malformed("an unknown purpose")),
        };
        let (group, channel, index, job) = (from.u64()?, from.u32()?, from.u32()?, from.array()?);
        Ok(Hello { world_size, from: rank, to, purpose, group, channel, index, job })
    }
}

/// Reason why a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The client does not follow the protocol, or was too slow. It gets no answer.
    Protocol,
    /// The other end runs this version of the protocol.
    Version(u16),
    WorldSize,
    Job,
    Rank,
    Secret,
    Purpose,
    Busy,
    /// The server uses TLS and the client does not.
    NeedsTls,
    /// The client uses TLS and the server does not.
    NoTls,
}

impl Refusal {
    /// All refusals; the index of one is its code.
    const ALL: [Refusal; 10] = [
        Refusal::Protocol,
        Refusal::Version(VERSION),
        Refusal::WorldSize,
        Refusal::Job,
        Refusal::Rank,
        Refusal::Secret,
        Refusal::Purpose,
        Refusal::Busy,
        Refusal::NeedsTls,
        Refusal::NoTls,
    ];

    /// Returns the code of a refusal in the answer to the client.
    fn code(self) -> u8 {
        match self {
            Refusal::Protocol => 0,
            Refusal::Version(_) => 1,
            Refusal::WorldSize => 2,
            Refusal::Job => 3,
            Refusal::Rank => 4,
            Refusal::Secret => 5,
            Refusal::Purpose => 6,
            Refusal::Busy => 7,
            Refusal::NeedsTls => 8,
            Refusal::NoTls => 9,
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refusal::Version(theirs) => {
                return write!(f, "refused: version {theirs} of the protocol there, version {VERSION} here");
            }
            Refusal::Protocol => "refused: not this protocol",
            Refusal::WorldSize => "refused: another world size",
            Refusal::Job => "refused: another job, or an earlier group of this one",
            Refusal::Rank => "refused: wrong rank",
            Refusal::Secret => "refused: wrong secret",
            Refusal::Purpose => "refused: a connection for an unknown purpose",
            Refusal::Busy => "refused: too many connections",
            Refusal::NeedsTls => "refused: the accepting rank uses TLS (BAGUA_TLS), the connecting one does not",
            Refusal::NoTls => "refused: the connecting rank uses TLS (BAGUA_TLS), the accepting one does not",
        })
    }
}

/// Reason why a client's attempt to connect failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// The connection broke. Another attempt may succeed.
    Broken {
        /// Text that says what happened.
        how: String,
        /// The operating system's error.
        source: Source,
    },
    /// The server refused the connection. It would refuse every further attempt.
    Refused(Refusal),
    /// TLS failed: the peer has another secret, no TLS, or a certificate that is not accepted. Every further attempt
    /// would fail as well.
    Tls(String),
}

impl Failed {
    /// True if the server was reached and ended the connection, as a server does that has too many connections. Another
    /// attempt may succeed.
    pub(super) fn ended_by_server(&self) -> bool {
        use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        let Failed::Broken { source, .. } = self else { return false };
        let kind = source.get().map(std::io::Error::kind);
        matches!(kind, Some(BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof))
    }

    /// Returns the operating system's error, if there was one.
    pub(super) fn source(&self) -> Source {
        match self {
            Failed::Broken { source, .. } => source.clone(),
            Failed::Refused(_) | Failed::Tls(_) => Source::default(),
        }
    }

    /// True if nothing listens at the server's address.
    pub(super) fn no_listener(&self) -> bool {
        let Failed::Broken { source, .. } = self else { return false };
        source.get().is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    }

    /// Creates the failure for a broken connection without an error of the operating system.
    pub(super) fn broken(how: impl Into<String>) -> Failed {
        Failed::Broken { how: how.into(), source: Source::default() }
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failed::Broken { how, .. } => f.write_str(how),
            Failed::Refused(why) => why.fmt(f),
            Failed::Tls(why) => f.write_str(why),
        }
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Failed {
        if let Some(why) = TlsFault::of(&error) {
            return Failed::Tls(why);
        }
        Failed::Broken { how: error.to_string(), source: error.into() }
    }
}

/// A hello that the server has received.
pub(super) struct ReceivedHello {
    pub(super) hello: Hello,
    bytes: [u8; HELLO_LEN],
}

/// Server, first step: reads the hello.
pub(super) async fn read_hello(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<ReceivedHello, Refusal> {
    let mut bytes = [0; HELLO_LEN];
    match tokio::time::timeout(STEP_TIMEOUT, stream.read_exact(&mut bytes)).await {
        Ok(Ok(_)) => Ok(ReceivedHello { hello: Hello::parse(&bytes)?, bytes }),
        Ok(Err(_)) | Err(_) => Err(Refusal::Protocol),
    }
}

/// Server, second step: sends its proof and checks the client's. [`accept`] or [`refuse`] must follow.
pub(super) async fn authenticate(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    received: &ReceivedHello,
    key: &Key,
) -> Result<(), Refusal> {
    let nonce = random::<32>().map_err(|_| Refusal::Busy)?;
    let own = key.proof(b"server", &received.bytes, &nonce).finalize().into_bytes();
    let mut answer = vec![ACCEPTED];
    answer.extend_from_slice(&nonce);
    answer.extend_from_slice(&own);
    let mut proof = [0; 32];
    let steps = async {
        stream.write_all(&answer).await?;
        stream.read_exact(&mut proof).await
    };
    match tokio::time::timeout(STEP_TIMEOUT, steps).await {
        Ok(Ok(_)) => {}
        // A client with another secret closes the connection after this answer.
        Ok(Err(_)) | Err(_) => return Err(Refusal::Protocol),
    }
    // `verify_slice` compares in constant time.
    key.proof(b"client", &received.bytes, &nonce).verify_slice(&proof).map_err(|_| Refusal::Secret)
}

/// Server, last step: accepts the connection.
pub(super) async fn accept(stream: &mut (impl AsyncWrite + Unpin)) -> std::io::Result<()> {
    stream.write_all(&[ACCEPTED]).await
}

/// True if a connection without TLS can begin with these bytes.
pub(super) fn is_hello(received: &[u8]) -> bool {
    received.starts_with(&MAGIC)
}

/// Server: closes a connection so that the client can read the reason. If the server closed it while bytes of the
/// client are unread, TCP would reset the connection, and the client could lose the reason. Best effort, within
/// [`STEP_TIMEOUT`].
pub(super) async fn dismiss(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let _ = tokio::time::timeout(STEP_TIMEOUT, async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(DISMISSED), &mut tokio::io::sink()).await
    })
    .await;
}

/// Server, last step: refuses the connection with a reason. Best effort, within [`STEP_TIMEOUT`].
pub(super) async fn refuse(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), why: Refusal) {
    if why != Refusal::Protocol {
        let _ = tokio::time::timeout(STEP_TIMEOUT, async {
            let mut answer = vec![REFUSED, why.code()];
            if let Refusal::Version(_) = why {
                answer.extend_from_slice(&VERSION.to_le_bytes());
            }
            stream.write_all(&answer).await?;
            stream.shutdown().await
        })
        .await;
    }
    if matches!(why, Refusal::NeedsTls | Refusal::NoTls) {
        dismiss(stream).await;
    }
}

/// Client: asks if a server runs. Returns when the server has answered. The caller limits the time.
pub(super) async fn probe(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), hello: &Hello) -> Result<(), Failed> {
    stream.write_all(&hello.encode(&[0; 32])).await?;
    read_answer(stream).await
}

/// Client: runs all steps. The caller limits the time, because the server may have to wait until it knows all addresses
/// and thus the key.
pub(super) async fn connect(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    hello: &Hello,
    key: &Key,
) -> Result<(), Failed> {
    let bytes = hello.encode(&random::<32>().map_err(|e| Failed::broken(e.to_string()))?);
    stream.write_all(&bytes).await?;
    read_answer(stream).await?;
    let mut both = [0; 64];
    stream.read_exact(&mut both).await?;
    let (nonce, theirs) = both.split_first_chunk::<32>().expect("64 bytes have a first 32");
    if key.proof(b"server", &bytes, nonce).verify_slice(theirs).is_err() {
        return Err(Failed::Refused(Refusal::Secret));
    }
    let own = key.proof(b"client", &bytes, nonce).finalize().into_bytes();
    stream.write_all(&own).await?;
    read_answer(stream).await
}

async fn read_answer(stream: &mut (impl AsyncRead + Unpin)) -> Result<(), Failed> {
    match stream.read_u8().await? {
        ACCEPTED => Ok(()),
        REFUSED => {
            let code = usize::from(stream.read_u8().await?);
            let why = match Refusal::ALL.get(code).copied().unwrap_or(Refusal::Protocol) {
                Refusal::Version(_) => Refusal::Version(stream.read_u16_le().await?),
                why => why,
            };
            Err(Failed::Refused(why))
        }
        _ => Err(Failed::Refused(Refusal::Protocol)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let (purpose, job) = (Purpose::Stream, [3; 8]);
        Hello { world_size: 4, from: 2, to: 1, purpose, group: 9, channel: 5, index: 1, job }
    }

    fn handshake(client_key: &Key, server_key: &Key) -> (Result<(), Failed>, Result<Hello, Refusal>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (mut client, mut server) = tokio::io::duplex(1024);
            let serve = async {
                let received = read_hello(&mut server).await?;
                let outcome = authenticate(&mut server, &received, server_key).await;
                match outcome {
                    Ok(()) => accept(&mut server).await.unwrap(),
                    Err(why) => refuse(&mut server, why).await,
                }
                outcome.map(|()| received.hello)
            };
            let dial = async {
                let outcome = connect(&mut client, &hello(), client_key).await;
                drop(client);
                outcome
            };
            tokio::join!(dial, serve)
        })
    }

    #[test]
    fn two_ends_with_one_secret_authenticate_each_other() {
        let key = Key::new(b"secret", b"job");
        assert_eq!(handshake(&key, &key), (Ok(()), Ok(hello())));
    }

    #[test]
    fn two_ends_with_different_secrets_refuse_each_other() {
        let (server, client) = (Key::new(b"secret", b"job"), Key::new(b"Secret", b"job"));
        assert_eq!(handshake(&client, &server), (Err(Failed::Refused(Refusal::Secret)), Err(Refusal::Protocol)));
    }

    #[test]
    fn an_encoded_hello_is_parsed_unchanged() {
        assert_eq!(Hello::parse(&hello().encode(&[1; 32])), Ok(hello()));
    }

    #[test]
    fn another_version_and_another_protocol_have_different_refusals() {
        let mut bytes = hello().encode(&[1; 32]);
        bytes[8] ^= 0x80;
        assert_eq!(Hello::parse(&bytes), Err(Refusal::Version(VERSION ^ 0x80)));
        bytes[0] ^= 1;
        assert_eq!(Hello::parse(&bytes), Err(Refusal::Protocol));
    }

    #[test]
    fn both_ends_name_both_versions() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let refused = runtime.block_on(async {
            let (mut client, mut server) = tokio::io::duplex(1024);
            refuse(&mut server, Refusal::Version(VERSION + 1)).await;
            read_answer(&mut client).await
        });
        assert_eq!(refused, Err(Failed::Refused(Refusal::Version(VERSION))), "the client gets the server's version");
        let text = Refusal::Version(VERSION + 1).to_string();
        assert!(text.contains(&format!("version {}", VERSION + 1)), "{text}");
        assert!(text.contains(&format!("version {VERSION} here")), "{text}");
    }

    #[test]
    fn the_code_of_a_refusal_is_its_index() {
        for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(refusal.code()), index);
        }
    }
}
