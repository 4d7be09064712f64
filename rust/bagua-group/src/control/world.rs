//! The addresses of the ranks of a world, and the key and ids that every rank derives from the addresses.

use super::super::address::Address;
use super::super::handshake::{Key, digest};
use super::super::views::Endpoint;

/// The abstract name of a Unix listener.
pub(super) fn unix_name(number: [u8; 16]) -> Vec<u8> {
    format!("bagua-{:032x}", u128::from_le_bytes(number)).into_bytes()
}

/// The addresses of all ranks, and the key and the ids derived from them.
pub(in super::super) struct World {
    /// By world rank.
    pub(in super::super) addresses: Vec<Address>,
    /// Authenticates the ranks of the job.
    pub(in super::super) key: Key,
    /// Public name of this incarnation of the job.
    pub(in super::super) job: [u8; 8],
    /// Id of the world group.
    pub(in super::super) id: u64,
    /// Digest of all addresses.
    digest: [u8; 32],
}

impl World {
    pub(in super::super) fn new(addresses: Vec<Address>, blobs: &[Vec<u8>], secret: &[u8]) -> World {
        let parts: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        World::of(addresses, digest(&parts), secret)
    }

    /// Returns the world of a view, whose members are ranks of this world and listen at `endpoints`. The digest differs
    /// between two proposals for one view: they come from two leaders and have different members (invariant 1 of
    /// views).
    pub(in super::super) fn next(&self, view: u64, members: &[usize], endpoints: &[Endpoint], secret: &[u8]) -> World {
        let names = self.listener_names(view);
        let mut listed = Vec::with_capacity(8 * members.len());
        let addresses = members.iter().zip(endpoints).enumerate().map(|(rank, (member, endpoint))| {
            let Endpoint { port, unix } = *endpoint;
            listed.extend_from_slice(&(*member as u64).to_le_bytes());
            listed.extend_from_slice(&[port.to_le_bytes(), [unix.into(), 0]].concat());
            let mut address = self.addresses[*member].clone();
            (address.rank, address.world_size) = (rank, members.len());
            address.unix = if unix { names(*member, port) } else { Vec::new() };
            if let Some(tcp) = &mut address.tcp {
                tcp.set_port(port);
            }
            address
        });
        let addresses = addresses.collect();
        World::of(addresses, digest(&[b"view", &self.digest, &view.to_le_bytes(), &listed]), secret)
    }

    /// The names of the Unix listeners of view `view`, by rank of this world and TCP port. Who has not the secret
    /// cannot take one before.
    pub(in super::super) fn listener_names(&self, view: u64) -> impl Fn(usize, u16) -> Vec<u8> + use<> {
        let key = self.key.derived(&[b"listeners", &view.to_le_bytes()]);
        move |rank, port| {
            let hash = digest(&[&key, &(rank as u64).to_le_bytes(), &port.to_le_bytes()]);
            unix_name(*hash.first_chunk().expect("32 bytes have a first 16"))
        }
    }

    fn of(addresses: Vec<Address>, all: [u8; 32], secret: &[u8]) -> World {
        let key = Key::new(secret, &all);
        let id = key.number(b"world");
        let job = *all.first_chunk().expect("32 bytes have a first 8");
        World { addresses, key, job, id, digest: all }
    }

    /// Distinguishes this incarnation of the group from others in message headers.
    pub(in super::super) fn epoch(&self) -> u32 {
        u32::try_from(self.key.number(b"epoch") >> 32).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(rank: usize) -> Address {
        Address {
            rank,
            world_size: 3,
            pid: 7 + rank as u32,
            pid_namespace: 8,
            tcp: Some(([127, 0, 0, 1], 4000 + rank as u16).into()),
            unix: vec![rank as u8],
            host_id: "a".into(),
            host_name: "b".into(),
            streams: 2,
            algorithm: 0,
            tls: 0,
            nonce: [rank as u8; 16],
        }
    }

    #[test]
    fn the_world_of_a_view_follows_from_the_former_one_its_members_and_where_they_listen() {
        let addresses: Vec<Address> = (0..3).map(address).collect();
        let blobs: Vec<Vec<u8>> = addresses.iter().map(Address::encode).collect();
        let world = World::new(addresses, &blobs, b"secret");
        let at = |ports: [u16; 2]| [(ports[0], false), (ports[1], true)].map(|(port, unix)| Endpoint { port, unix });
        let next = |view, members: &[usize; 2], ports| world.next(view, members, &at(ports), b"secret");
        let view = next(2, &[0, 2], [81, 82]);
        assert_eq!(view.addresses.len(), 2);
        assert_eq!(view.addresses[0].tcp, Some(([127, 0, 0, 1], 81).into()));
        assert_eq!(view.addresses[0].unix, b"");
        let tcp = Some(([127, 0, 0, 1], 82).into());
        let unix = world.listener_names(2)(2, 82);
        assert_eq!(view.addresses[1], Address { rank: 1, world_size: 2, tcp, unix: unix.clone(), ..address(2) });
        assert_eq!((view.id, view.job), (next(2, &[0, 2], [81, 82]).id, next(2, &[0, 2], [81, 82]).job));
        // Another number, membership or port gives another view. Without the secret, nobody can derive the listener
        // names.
        let others = [next(3, &[0, 2], [81, 82]), next(2, &[1, 2], [81, 82]), next(2, &[0, 2], [81, 83])];
        for other in others.iter().chain([&world]) {
            assert_ne!((view.id, view.job), (other.id, other.job));
        }
        let stranger = World::new((0..3).map(address).collect(), &blobs, b"another");
        for name in [world.listener_names(3)(2, 82), world.listener_names(2)(1, 82), stranger.listener_names(2)(2, 82)]
        {
            assert_ne!(unix, name);
        }
    }
}
