//! A group of the same ranks with its own connections, like `MPI_Comm_dup`. Failures of one group do not affect the
//! other.

use super::address::{SLOT, put, take};
use super::bootstrap::Bootstrap;
use super::config::Config;
use super::group::Group;
use super::lane::{Lane, Options};
use crate::error::{Error, Result};
use crate::request::{Io, Verb};
use crate::types::DType;

impl Group {
    /// Builds a group with the ranks of this group. The addresses travel over `lane`, a lane of this group. Collective.
    /// Returns the errors of [`Lane::run`] and [`Bootstrap::connect`].
    pub fn duplicate(&self, lane: &mut Lane, name: &str) -> Result<Group> {
        let mut config = Config {
            rank: self.rank(),
            world_size: self.size(),
            name: name.to_owned(),
            view: 0,
            ..self.config().clone()
        };
        // A port that the configuration names is already used by this group.
        config.listen.set_port(0);
        let bootstrap = Bootstrap::bind(config)?;
        let mut own = vec![0; SLOT];
        put(&mut own, bootstrap.address());
        let mut all = vec![0; SLOT * self.size()];
        let options = Options { label: "addresses", ..Options::DEFAULT };
        lane.run(&options, DType::U8, Verb::AllGather, Io::split(&own, &mut all))?;
        let addresses: Option<Vec<Vec<u8>>> = all.chunks(SLOT).map(take).collect();
        bootstrap.connect(&addresses.ok_or_else(|| Error::other("an address is missing"))?)
    }
}
