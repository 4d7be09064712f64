//! How a connection begins: both ends prove that they know the job's secret, and agree on what the connection is for.
//!
//! ```text
//! client  hello    magic, version, world size, from, to, purpose, group, channel, index, job, nonce     (fixed length)
//! server  answer   0, nonce, HMAC("server", hello, nonce)                                               or 1, code
//! client  proof    HMAC("client", hello, nonce)
//! server  verdict  0                                                                                    or 1, code
//! ```
//!
//! The hello is covered by both proofs, so nobody can change what a connection is for. The two labels keep an answer from
//! being played back as a proof. There is no length that a stranger chooses. Every step has a time limit.

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::VERSION;
use super::wire::{Garbled, Reader, Writer};
use crate::error::{self, Error, Source};

/// What an honest peer needs for one step, with a wide margin.
pub(super) const STEP: Duration = Duration::from_secs(5);

/// First bytes of every connection.
const MAGIC: [u8; 8] = *b"BGhello\n";

/// Length of a hello.
const HELLO: usize = 8 + 2 + 4 + 4 + 4 + 1 + 8 + 4 + 4 + 8 + 32;

/// "Go on."
const YES: u8 = 0;

/// "No", followed by a code.
const NO: u8 = 1;

/// Random bytes from the system.
pub(super) fn random<const N: usize>() -> error::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", e))?;
    }
    Ok(bytes)
}

/// SHA-256 of some bytes.
pub(super) fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().into()
}

/// What the ranks of one job, and nobody else, can compute.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// The key that a secret gives for a purpose.
    pub(super) fn new(secret: &[u8], purpose: &[u8]) -> Key {
        Key(code(secret, &[purpose]).finalize().into_bytes().into())
    }

    /// A number that differs between keys and says nothing about them.
    pub(super) fn number(&self, label: &[u8]) -> u64 {
        let bytes: [u8; 32] = code(&self.0, &[label]).finalize().into_bytes().into();
        u64::from_le_bytes(*bytes.first_chunk().expect("32 bytes have a first 8"))
    }

    fn proof(&self, side: &[u8], hello: &[u8; HELLO], nonce: &[u8; 32]) -> Hmac<Sha256> {
        code(&self.0, &[side, hello, nonce])
    }
}

fn code(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum Purpose {
    /// Heartbeats, failures, goodbyes.
    Control = 1,
    /// Data of a lane.
    Stream = 2,
    /// A descriptor of shared memory.
    Segment = 3,
    /// Spreading addresses before there is a group.
    Rendezvous = 4,
}

/// What the client says of itself and of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) world_size: usize,
    /// World rank of the client.
    pub(super) from: usize,
    /// World rank that it means to talk to.
    pub(super) to: usize,
    pub(super) purpose: Purpose,
    /// Id of the group.
    pub(super) group: u64,
    /// Lane of the group.
    pub(super) channel: u32,
    /// Which of several connections of this purpose and lane.
    pub(super) index: u32,
    /// Which incarnation of the job: the first bytes of the digest of all addresses.
    pub(super) job: [u8; 8],
}

impl Hello {
    fn encode(&self, nonce: &[u8; 32]) -> [u8; HELLO] {
        let mut out = Writer::default();
        out.fixed(&MAGIC).u16(VERSION).rank(self.world_size).rank(self.from).rank(self.to).u8(self.purpose as u8);
        out.u64(self.group).u32(self.channel).u32(self.index).fixed(&self.job).fixed(nonce);
        out.0.try_into().expect("HELLO is the sum of the fields")
    }

    fn parse(bytes: &[u8; HELLO]) -> Result<Hello, Refusal> {
        let mut from = Reader(bytes);
        if from.array() != Ok(MAGIC) {
            return Err(Refusal::Stranger);
        }
        if from.u16() != Ok(VERSION) {
            return Err(Refusal::Version);
        }
        Hello::fields(&mut from).map_err(|Garbled(_)| Refusal::Purpose)
    }

    fn fields(from: &mut Reader<'_>) -> Result<Hello, Garbled> {
        let (world_size, rank, to) = (from.rank()?, from.rank()?, from.rank()?);
        let purpose = match from.u8()? {
            1 => Purpose::Control,
            2 => Purpose::Stream,
            3 => Purpose::Segment,
            4 => Purpose::Rendezvous,
            _ => return Err(Garbled("an unknown purpose")),
        };
        let (group, channel, index, job) = (from.u64()?, from.u32()?, from.u32()?, from.array()?);
        Ok(Hello { world_size, from: rank, to, purpose, group, channel, index, job })
    }
}

/// Why a connection was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Refusal {
    /// It does not speak this protocol, or said nothing in time. Gets no answer.
    Stranger = 0,
    Version = 1,
    WorldSize = 2,
    Job = 3,
    Rank = 4,
    Secret = 5,
    Purpose = 6,
    Busy = 7,
    Duplicate = 8,
}

impl Refusal {
    const ALL: [Refusal; 9] = [
        Refusal::Stranger,
        Refusal::Version,
        Refusal::WorldSize,
        Refusal::Job,
        Refusal::Rank,
        Refusal::Secret,
        Refusal::Purpose,
        Refusal::Busy,
        Refusal::Duplicate,
    ];
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refusal::Stranger => "refused: not this protocol",
            Refusal::Version => "refused: another protocol version",
            Refusal::WorldSize => "refused: another world size",
            Refusal::Job => "refused: another job, or an earlier group of this one",
            Refusal::Rank => "refused: wrong rank",
            Refusal::Secret => "refused: wrong secret",
            Refusal::Purpose => "refused: a connection for an unknown purpose",
            Refusal::Busy => "refused: too many connections",
            Refusal::Duplicate => "refused: this rank is already connected",
        })
    }
}

/// How a client's attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// The connection broke: worth another attempt.
    Broken {
        /// What broke it.
        how: String,
        /// The operating system's error.
        source: Source,
    },
    /// The other side said no, and will say so again.
    Refused(Refusal),
}

impl Failed {
    /// A connection that broke without an error of the operating system.
    pub(super) fn broken(how: impl Into<String>) -> Failed {
        Failed::Broken { how: how.into(), source: Source::default() }
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failed::Broken { how, .. } => f.write_str(how),
            Failed::Refused(why) => why.fmt(f),
        }
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Failed {
        Failed::Broken { how: error.to_string(), source: error.into() }
    }
}

/// A client that has said hello and waits for an answer to be made.
pub(super) struct Greeted {
    pub(super) hello: Hello,
    bytes: [u8; HELLO],
}

/// Server, first step: reads the hello.
pub(super) async fn greet(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<Greeted, Refusal> {
    let mut bytes = [0; HELLO];
    match tokio::time::timeout(STEP, stream.read_exact(&mut bytes)).await {
        Ok(Ok(_)) => Ok(Greeted { hello: Hello::parse(&bytes)?, bytes }),
        Ok(Err(_)) | Err(_) => Err(Refusal::Stranger),
    }
}

/// Server, second step: proves that it knows the key and has the client prove the same. What remains is the verdict.
pub(super) async fn prove(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    greeted: &Greeted,
    key: &Key,
) -> Result<(), Refusal> {
    let nonce = random::<32>().map_err(|_| Refusal::Busy)?;
    let own = key.proof(b"server", &greeted.bytes, &nonce).finalize().into_bytes();
    let mut answer = vec![YES];
    answer.extend_from_slice(&nonce);
    answer.extend_from_slice(&own);
    let mut proof = [0; 32];
    let steps = async {
        stream.write_all(&answer).await?;
        stream.read_exact(&mut proof).await
    };
    match tokio::time::timeout(STEP, steps).await {
        Ok(Ok(_)) => {}
        // A client with another secret does not like the answer and hangs up.
        Ok(Err(_)) | Err(_) => return Err(Refusal::Stranger),
    }
    // Compares in constant time.
    key.proof(b"client", &greeted.bytes, &nonce).verify_slice(&proof).map_err(|_| Refusal::Secret)
}

/// Server, last step: yes.
pub(super) async fn welcome(stream: &mut (impl AsyncWrite + Unpin)) -> std::io::Result<()> {
    stream.write_all(&[YES]).await
}

/// Server, last step: no, and why. Best effort, in limited time.
pub(super) async fn refuse(stream: &mut (impl AsyncWrite + Unpin), why: Refusal) {
    if why != Refusal::Stranger {
        let _ = tokio::time::timeout(STEP, async {
            stream.write_all(&[NO, why as u8]).await?;
            stream.shutdown().await
        })
        .await;
    }
}

/// Client: all steps. The caller limits the time, because a server may have to wait until it knows its own key.
pub(super) async fn introduce(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    hello: &Hello,
    key: &Key,
) -> Result<(), Failed> {
    let bytes = hello.encode(&random::<32>().map_err(|e| Failed::broken(e.to_string()))?);
    stream.write_all(&bytes).await?;
    verdict(stream).await?;
    let (mut nonce, mut theirs) = ([0; 32], [0; 32]);
    stream.read_exact(&mut nonce).await?;
    stream.read_exact(&mut theirs).await?;
    if key.proof(b"server", &bytes, &nonce).verify_slice(&theirs).is_err() {
        return Err(Failed::Refused(Refusal::Secret));
    }
    let own = key.proof(b"client", &bytes, &nonce).finalize().into_bytes();
    stream.write_all(&own).await?;
    verdict(stream).await
}

async fn verdict(stream: &mut (impl AsyncRead + Unpin)) -> Result<(), Failed> {
    match stream.read_u8().await? {
        YES => Ok(()),
        NO => {
            let code = usize::from(stream.read_u8().await?);
            Err(Failed::Refused(Refusal::ALL.get(code).copied().unwrap_or(Refusal::Stranger)))
        }
        _ => Err(Failed::Refused(Refusal::Stranger)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let (purpose, job) = (Purpose::Stream, [3; 8]);
        Hello { world_size: 4, from: 2, to: 1, purpose, group: 9, channel: 5, index: 1, job }
    }

    fn meet(theirs: &Key, mine: &Key) -> (Result<(), Failed>, Result<Hello, Refusal>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (mut client, mut server) = tokio::io::duplex(1024);
            let serve = async {
                let greeted = greet(&mut server).await?;
                let proved = prove(&mut server, &greeted, mine).await;
                match proved {
                    Ok(()) => welcome(&mut server).await.unwrap(),
                    Err(why) => refuse(&mut server, why).await,
                }
                proved.map(|()| greeted.hello)
            };
            let say = async {
                let hello = hello();
                let said = introduce(&mut client, &hello, theirs).await;
                drop(client);
                said
            };
            tokio::join!(say, serve)
        })
    }

    #[test]
    fn two_ends_with_one_secret_meet() {
        let key = Key::new(b"secret", b"job");
        assert_eq!(meet(&key, &key), (Ok(()), Ok(hello())));
    }

    #[test]
    fn two_ends_with_two_secrets_part() {
        let (mine, theirs) = (Key::new(b"secret", b"job"), Key::new(b"Secret", b"job"));
        assert_eq!(meet(&theirs, &mine), (Err(Failed::Refused(Refusal::Secret)), Err(Refusal::Stranger)));
    }

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        assert_eq!(Hello::parse(&hello().encode(&[1; 32])), Ok(hello()));
    }

    #[test]
    fn another_version_and_another_protocol_are_told_apart() {
        let mut bytes = hello().encode(&[1; 32]);
        bytes[8] ^= 0x80;
        assert_eq!(Hello::parse(&bytes), Err(Refusal::Version));
        bytes[0] ^= 1;
        assert_eq!(Hello::parse(&bytes), Err(Refusal::Stranger));
    }

    #[test]
    fn a_refusals_code_is_its_place() {
        for (place, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, place);
        }
    }
}
