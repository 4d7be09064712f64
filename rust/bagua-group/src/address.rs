//! The address blob of a rank. The caller of [`Bootstrap`](super::Bootstrap) exchanges the blobs of all ranks.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::config::Config;
use super::tls::Tls;
use super::wire::{Encoding, Malformed, Reader, VERSION, bytes, rank, shared_text, socket};
use crate::collective::Algorithm;
use crate::error::{self, Error};
pub(super) use crate::platform::{host_id, host_name, pid_namespace};

/// First bytes of an address blob.
const MAGIC: [u8; 4] = *b"BGad";

/// Maximum length of a blob. A longer one is refused before it is parsed.
pub(super) const LIMIT: usize = 4096;

/// Number of bytes of the length that precedes a blob in a slot.
const LENGTH: usize = 4;

/// Number of bytes of a slot, which holds one blob in an exchange of parts of equal size.
pub const SLOT: usize = LENGTH + LIMIT;

/// Writes a blob into a slot of [`SLOT`] zeros. Panics if the blob does not fit.
pub fn put(slot: &mut [u8], blob: &[u8]) {
    let (length, room) = slot.split_at_mut(LENGTH);
    length.copy_from_slice(&(blob.len() as u32).to_le_bytes());
    room[..blob.len()].copy_from_slice(blob);
}

/// Returns the blob in a slot, or `None` if the slot is empty.
pub fn take(slot: &[u8]) -> Option<Vec<u8>> {
    let (length, room) = slot.split_first_chunk::<LENGTH>()?;
    let blob = room.get(..u32::from_le_bytes(*length) as usize)?;
    (!blob.is_empty()).then(|| blob.to_vec())
}

/// The listening sockets and the identity of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Address {
    /// Rank in the world.
    #[serde(with = "rank")]
    pub(super) rank: usize,
    /// Number of ranks in the rank's configuration.
    #[serde(with = "rank")]
    pub(super) world_size: usize,
    /// Process id in the process's own namespace.
    pub(super) pid: u32,
    /// Identifies the process namespace of `pid` on the host. 0 if `pid` cannot be used to find the process.
    pub(super) pid_namespace: u64,
    /// TCP listener. `None` in a world of one.
    #[serde(with = "socket")]
    pub(super) tcp: Option<SocketAddr>,
    /// Abstract name of the Unix listener; empty without one.
    #[serde(with = "bytes")]
    pub(super) unix: Vec<u8>,
    /// Identity of the host: equal on ranks that may share memory.
    #[serde(with = "shared_text")]
    pub(super) host_id: Arc<str>,
    /// Name of the host, for error texts.
    #[serde(with = "shared_text")]
    pub(super) host_name: Arc<str>,
    /// Number of TCP streams to each peer of a lane, from the rank's configuration.
    pub(super) streams: u8,
    /// Code of the all_reduce algorithm between hosts, from the rank's configuration.
    pub(super) algorithm: u8,
    /// Code of the kind of TLS, from the rank's configuration.
    pub(super) tls: u8,
    /// Random bytes that distinguish two groups of the same ranks, and stale blobs from current ones.
    pub(super) nonce: [u8; 16],
}

impl Encoding for Address {}

impl Address {
    /// Returns the address as a blob: magic bytes and version, which every version of the protocol has, then the
    /// encoded fields.
    pub(super) fn encode(&self) -> Vec<u8> {
        [&MAGIC[..], &VERSION.to_le_bytes(), &Encoding::encode(self)].concat()
    }

    /// Returns the protocol version of a blob, or `None` if the blob is not an address.
    fn version(blob: &[u8]) -> Option<u16> {
        let mut from = Reader(blob);
        if from.array() != Ok(MAGIC) {
            return None;
        }
        from.u16().ok()
    }

    /// Parses a blob.
    pub(super) fn parse(blob: &[u8]) -> Result<Address, Malformed> {
        if blob.len() > LIMIT {
            return Err(Malformed("it is too long"));
        }
        let mut from = Reader(blob);
        if from.array()? != MAGIC {
            return Err(Malformed("it does not start with the magic bytes of an address"));
        }
        if from.u16()? != VERSION {
            return Err(Malformed("it has another protocol version"));
        }
        Encoding::parse(from.0)
    }

    /// Parses the blobs of all ranks, in rank order. Checks them against each other and against this rank's own blob.
    pub(super) fn parse_all(blobs: &[Vec<u8>], config: &Config, own: &[u8]) -> error::Result<Vec<Address>> {
        let size = config.world_size;
        if blobs.len() != size {
            return Err(Error::InvalidArgument(format!("{} addresses for a world of {size} ranks", blobs.len())));
        }
        let mut all: Vec<Address> = Vec::with_capacity(size);
        let mut nonces: HashMap<[u8; 16], usize> = HashMap::with_capacity(size);
        for (rank, blob) in blobs.iter().enumerate() {
            if let Some(theirs) = Address::version(blob).filter(|&theirs| theirs != VERSION) {
                return Err(Error::Mismatch(format!(
                    "rank {rank} runs version {theirs} of the protocol, rank {} version {VERSION}",
                    config.rank
                )));
            }
            let mut address = Address::parse(blob)
                .map_err(|why| Error::InvalidArgument(format!("the address of rank {rank} is malformed: {why}")))?;
            if address.rank != rank {
                let text = format!("address {rank} of the list is the address of rank {}", address.rank);
                return Err(Error::InvalidArgument(text));
            }
            if address.world_size != size {
                let theirs = address.world_size;
                return Err(Error::Mismatch(format!(
                    "rank {rank} has world size {theirs}, rank {} has {size}",
                    config.rank
                )));
            }
            let algorithm = config.algorithm as u8;
            if address.algorithm != algorithm {
                let name = |code: u8| Algorithm::ALL.get(usize::from(code)).map_or("unknown", |known| known.name());
                return Err(Error::Mismatch(format!(
                    "rank {rank} uses algorithm '{}' between hosts, rank {} uses '{}'",
                    name(address.algorithm),
                    config.rank,
                    name(algorithm),
                )));
            }
            let tls = Tls::code(config.tls.as_ref());
            if address.tls != tls {
                return Err(Error::Mismatch(format!(
                    "rank {rank} uses {}, rank {} uses {} (BAGUA_TLS)",
                    Tls::describe(address.tls),
                    config.rank,
                    Tls::describe(tls),
                )));
            }
            if let Some(twin) = nonces.insert(address.nonce, rank) {
                let text = format!("ranks {twin} and {rank} have the same address");
                return Err(Error::InvalidArgument(text));
            }
            if address.tcp.is_none() && size > 1 {
                return Err(Error::InvalidArgument(format!("the address of rank {rank} has no TCP listener")));
            }
            if let Some(before) = all.last() {
                address.share_texts(before);
            }
            all.push(address);
        }
        if blobs[config.rank] != own {
            let text =
                format!("the list has another address for rank {} than the one that this rank published", config.rank);
            return Err(Error::InvalidArgument(text));
        }
        Ok(all)
    }

    /// Shares the memory of texts that are equal in both addresses. Ranks of one host usually follow each other, so
    /// this saves most of the memory.
    fn share_texts(&mut self, other: &Address) {
        let Address { host_id, host_name, .. } = self;
        for (own, theirs) in [(host_id, &other.host_id), (host_name, &other.host_name)] {
            if own == theirs {
                *own = Arc::clone(theirs);
            }
        }
    }

    /// Returns rank, address, host and process, for error texts.
    pub(super) fn describe(&self) -> String {
        let tcp = self.tcp.map_or_else(|| "no address".to_owned(), |tcp| tcp.to_string());
        format!("rank {} at {tcp} ({}, process {})", self.rank, self.host_name, self.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(rank: usize, world_size: usize) -> Address {
        Address {
            rank,
            world_size,
            pid: 7,
            pid_namespace: 8,
            tcp: Some(SocketAddr::from(([127, 0, 0, 1], 4000))),
            unix: b"bagua-1".to_vec(),
            host_id: "a".into(),
            host_name: "b".into(),
            streams: 2,
            algorithm: 0,
            tls: 0,
            nonce: [u8::try_from(rank).unwrap(); 16],
        }
    }

    fn refusal(blobs: &[Vec<u8>], own: usize) -> Error {
        let config = Config::new(own, blobs.len());
        Address::parse_all(blobs, &config, &address(own, blobs.len()).encode()).unwrap_err()
    }

    #[test]
    fn addresses_of_a_world_are_parsed_in_rank_order() {
        let blobs: Vec<_> = (0..3).map(|rank| address(rank, 3).encode()).collect();
        let all = Address::parse_all(&blobs, &Config::new(1, 3), &blobs[1]).unwrap();
        assert_eq!(all[2], address(2, 3));
    }

    #[test]
    fn bad_addresses_are_refused_with_their_rank() {
        let good = |rank| address(rank, 2).encode();
        assert!(
            matches!(refusal(&[good(0), b"hello".to_vec()], 0), Error::InvalidArgument(text) if text.contains("rank 1"))
        );
        assert!(matches!(refusal(&[good(1), good(0)], 0), Error::InvalidArgument(text) if text.contains("address 0")));
        let other = address(1, 5).encode();
        assert!(
            matches!(refusal(&[good(0), other], 0), Error::Mismatch(text) if text.contains("rank 1 has world size 5"))
        );
        let ring = Address { algorithm: Algorithm::Ring as u8, ..address(1, 2) }.encode();
        assert!(
            matches!(refusal(&[good(0), ring], 0), Error::Mismatch(text) if text.contains("rank 1") && text.contains("ring"))
        );
        let encrypted = Address { tls: Tls::code(Some(&Tls::Secret)), ..address(1, 2) }.encode();
        assert!(
            matches!(refusal(&[good(0), encrypted], 0), Error::Mismatch(text) if text.contains("rank 1 uses TLS by the secret") && text.contains("rank 0 uses no TLS"))
        );
        let twin = Address { nonce: [0; 16], ..address(1, 2) }.encode();
        assert!(matches!(refusal(&[good(0), twin], 0), Error::InvalidArgument(text) if text.contains("same address")));
        let mut version = good(1);
        version[4] ^= 0x40;
        let theirs = format!("rank 1 runs version {} of the protocol", VERSION ^ 0x40);
        let ours = format!("rank 0 version {VERSION}");
        assert!(
            matches!(refusal(&[good(0), version], 0), Error::Mismatch(text) if text.contains(&theirs) && text.contains(&ours))
        );
        let mut longer = good(1);
        longer.push(0);
        assert!(matches!(refusal(&[good(0), longer], 0), Error::InvalidArgument(text) if text.contains("trailing")));
        let own = Address { pid: 8, ..address(0, 2) }.encode();
        assert!(
            matches!(refusal(&[own, good(1)], 0), Error::InvalidArgument(text) if text.contains("another address for rank 0"))
        );
    }
}
