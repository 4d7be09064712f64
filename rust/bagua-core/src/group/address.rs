//! What a rank tells the others about where it is: the blob that the caller spreads.

use std::collections::HashMap;
use std::net::SocketAddr;

use super::config::Config;
use super::wire::{Garbled, Reader, VERSION, Writer};
use crate::collective::Algorithm;
use crate::error::{self, Error};

/// First bytes of a blob.
const MAGIC: [u8; 4] = *b"BGad";

/// Longer ones are refused unread.
const LIMIT: usize = 4096;

/// Where a rank listens, and who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// Rank in the world.
    pub(super) rank: usize,
    /// How many ranks it was told there are.
    pub(super) world_size: usize,
    /// Process id, for error texts.
    pub(super) pid: u32,
    /// TCP listener. `None` in a world of one.
    pub(super) tcp: Option<SocketAddr>,
    /// Abstract name of the Unix listener; empty: there is none.
    pub(super) unix: Vec<u8>,
    /// Equal on ranks that may share memory.
    pub(super) host_id: String,
    /// For people.
    pub(super) host_name: String,
    /// TCP streams that it wants for each lane and peer.
    pub(super) streams: u8,
    /// Code of the algorithm that it was told to use between hosts.
    pub(super) algorithm: u8,
    /// Makes two groups of the same ranks different, and stale blobs recognisable.
    pub(super) nonce: [u8; 16],
}

impl Address {
    /// The blob.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.fixed(&MAGIC).u16(VERSION).rank(self.rank).rank(self.world_size).u32(self.pid).fixed(&self.nonce);
        out.text(&self.tcp.map(|tcp| tcp.to_string()).unwrap_or_default()).bytes(&self.unix);
        out.text(&self.host_id).text(&self.host_name).u8(self.streams).u8(self.algorithm);
        out.0
    }

    /// The address in a blob.
    fn parse(blob: &[u8]) -> Result<Address, Garbled> {
        if blob.len() > LIMIT {
            return Err(Garbled("it is too long"));
        }
        let mut from = Reader(blob);
        if from.array()? != MAGIC {
            return Err(Garbled("it does not begin as one"));
        }
        if from.u16()? != VERSION {
            return Err(Garbled("another version of the protocol wrote it"));
        }
        let (rank, world_size, pid, nonce) = (from.rank()?, from.rank()?, from.u32()?, from.array()?);
        let tcp = match from.text()? {
            none if none.is_empty() => None,
            some => Some(some.parse().map_err(|_| Garbled("its TCP address cannot be read"))?),
        };
        let unix = from.bytes()?.to_vec();
        let (host_id, host_name) = (from.text()?, from.text()?);
        let (streams, algorithm) = (from.u8()?, from.u8()?);
        from.end()?;
        Ok(Address { rank, world_size, pid, tcp, unix, host_id, host_name, streams, algorithm, nonce })
    }

    /// The addresses of a whole world, in rank order, checked against each other and against the own one.
    pub(super) fn parse_all(blobs: &[Vec<u8>], config: &Config, own: &[u8]) -> error::Result<Vec<Address>> {
        let size = config.world_size;
        if blobs.len() != size {
            return Err(Error::InvalidArgument(format!("{} addresses for a world of {size} ranks", blobs.len())));
        }
        let mut all: Vec<Address> = Vec::with_capacity(size);
        let mut nonces: HashMap<[u8; 16], usize> = HashMap::with_capacity(size);
        for (rank, blob) in blobs.iter().enumerate() {
            let address = Address::parse(blob)
                .map_err(|why| Error::InvalidArgument(format!("the address of rank {rank} cannot be used: {why}")))?;
            if address.rank != rank {
                let text = format!("in place {rank} of the addresses stands that of rank {}", address.rank);
                return Err(Error::InvalidArgument(text));
            }
            if address.world_size != size {
                let theirs = address.world_size;
                return Err(Error::Mismatch(format!(
                    "rank {rank} was told that there are {theirs} ranks, rank {} that there are {size}",
                    config.rank
                )));
            }
            let algorithm = config.algorithm as u8;
            if address.algorithm != algorithm {
                let name = |code: u8| Algorithm::ALL.get(usize::from(code)).map_or("unknown", |known| known.name());
                return Err(Error::Mismatch(format!(
                    "rank {rank} was told to use the {} algorithm between hosts, rank {} the {}",
                    name(address.algorithm),
                    config.rank,
                    name(algorithm),
                )));
            }
            if let Some(twin) = nonces.insert(address.nonce, rank) {
                let text = format!("ranks {twin} and {rank} have the same address");
                return Err(Error::InvalidArgument(text));
            }
            if address.tcp.is_none() && size > 1 {
                return Err(Error::InvalidArgument(format!("the address of rank {rank} has no TCP listener")));
            }
            all.push(address);
        }
        if blobs[config.rank] != own {
            let text = format!("the address of rank {} is not the one that this rank gave", config.rank);
            return Err(Error::InvalidArgument(text));
        }
        Ok(all)
    }

    /// Where it is, for error texts.
    pub(super) fn place(&self) -> String {
        let tcp = self.tcp.map_or_else(|| "no address".to_owned(), |tcp| tcp.to_string());
        format!("rank {} at {tcp} ({}, process {})", self.rank, self.host_name, self.pid)
    }
}

/// Equal for processes that can reach each other's abstract Unix sockets: one kernel, one network namespace.
pub(super) fn host_id() -> error::Result<String> {
    use std::os::unix::fs::MetadataExt;
    let path = "/proc/sys/kernel/random/boot_id";
    let boot = std::fs::read_to_string(path).map_err(|e| Error::system(path, e))?;
    let path = "/proc/self/ns/net";
    let namespace = std::fs::metadata(path).map_err(|e| Error::system(path, e))?;
    Ok(format!("{}:{}:{}", boot.trim(), namespace.dev(), namespace.ino()))
}

/// The system's name for this host.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "localhost".to_owned() } else { name.trim().to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(rank: usize, world_size: usize) -> Address {
        Address {
            rank,
            world_size,
            pid: 7,
            tcp: Some(SocketAddr::from(([127, 0, 0, 1], 4000))),
            unix: b"bagua-1".to_vec(),
            host_id: "a".to_owned(),
            host_name: "b".to_owned(),
            streams: 2,
            algorithm: 0,
            nonce: [u8::try_from(rank).unwrap(); 16],
        }
    }

    fn refused(blobs: &[Vec<u8>], own: usize) -> Error {
        let config = Config::new(own, blobs.len());
        Address::parse_all(blobs, &config, &address(own, blobs.len()).encode()).unwrap_err()
    }

    #[test]
    fn good_addresses_are_understood() {
        let blobs: Vec<_> = (0..3).map(|rank| address(rank, 3).encode()).collect();
        let all = Address::parse_all(&blobs, &Config::new(1, 3), &blobs[1]).unwrap();
        assert_eq!(all[2], address(2, 3));
    }

    #[test]
    fn bad_addresses_are_refused_by_name() {
        let good = |rank| address(rank, 2).encode();
        assert!(
            matches!(refused(&[good(0), b"hello".to_vec()], 0), Error::InvalidArgument(text) if text.contains("rank 1"))
        );
        assert!(matches!(refused(&[good(1), good(0)], 0), Error::InvalidArgument(text) if text.contains("place 0")));
        let other = address(1, 5).encode();
        assert!(matches!(refused(&[good(0), other], 0), Error::Mismatch(text) if text.contains("rank 1 was told")));
        let ring = Address { algorithm: Algorithm::Ring as u8, ..address(1, 2) }.encode();
        assert!(
            matches!(refused(&[good(0), ring], 0), Error::Mismatch(text) if text.contains("rank 1") && text.contains("ring"))
        );
        let twin = Address { nonce: [0; 16], ..address(1, 2) }.encode();
        assert!(matches!(refused(&[good(0), twin], 0), Error::InvalidArgument(text) if text.contains("same address")));
        let mut version = good(1);
        version[4] ^= 0x40;
        assert!(matches!(refused(&[good(0), version], 0), Error::InvalidArgument(text) if text.contains("version")));
        let mut longer = good(1);
        longer.push(0);
        assert!(matches!(refused(&[good(0), longer], 0), Error::InvalidArgument(text) if text.contains("more than")));
        let own = Address { pid: 8, ..address(0, 2) }.encode();
        assert!(matches!(refused(&[own, good(1)], 0), Error::InvalidArgument(text) if text.contains("not the one")));
    }

    proptest! {
        #[test]
        fn random_blobs_never_panic(tail in proptest::collection::vec(any::<u8>(), 0..120)) {
            let mut blob = address(0, 1).encode();
            blob.truncate(blob.len().saturating_sub(tail.len()));
            blob.extend(tail);
            let _ = Address::parse(&blob);
        }
    }
}
