//! A group of the same ranks with connections of its own, as `MPI_Comm_dup` makes one: its failures and departures are its own.

use super::address::LIMIT;
use super::bootstrap::Bootstrap;
use super::config::Config;
use super::lane::{Lane, Options};
use super::membership::Group;
use crate::error::{Error, Result};
use crate::request::{Io, Verb};
use crate::types::DType;

/// Bytes of the length before an address.
const LENGTH: usize = 4;

impl Group {
    /// Builds the group; its ranks are those of this group. The addresses travel over `lane`, a lane of this group. Collective.
    ///
    /// # Errors
    /// As [`Lane::run`] and [`Bootstrap::connect`].
    pub fn duplicate(&self, lane: &mut Lane, name: &str) -> Result<Group> {
        let mut config = Config {
            rank: self.rank(),
            world_size: self.size(),
            name: name.to_owned(),
            view: 0,
            ..self.config().clone()
        };
        // This group has a port that was asked for.
        config.listen.set_port(0);
        let bootstrap = Bootstrap::bind(config)?;
        let slot = LENGTH + LIMIT;
        let mut own = vec![0; slot];
        let address = bootstrap.address();
        let length = u32::try_from(address.len()).map_err(|_| Error::other("an address beyond its limit"))?;
        own[..LENGTH].copy_from_slice(&length.to_le_bytes());
        own[LENGTH..LENGTH + address.len()].copy_from_slice(address);
        let mut all = vec![0; slot * self.size()];
        let options = Options { label: "addresses", ..Options::DEFAULT };
        lane.run(&options, DType::U8, Verb::AllGather, Io::split(&own, &mut all))?;
        let address_in = |slot: &[u8]| {
            let (length, rest) = slot.split_first_chunk::<LENGTH>()?;
            rest.get(..u32::from_le_bytes(*length) as usize).map(<[u8]>::to_vec)
        };
        let addresses: Option<Vec<Vec<u8>>> = all.chunks(slot).map(address_in).collect();
        bootstrap.connect(&addresses.ok_or_else(|| Error::other("an address that is longer than its room"))?)
    }
}
