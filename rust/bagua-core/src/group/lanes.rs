//! Building a lane: its sockets, its shared memory, and the collective that fits the group.

use std::sync::Arc;

use super::control::Control;
use crate::collective::Collective;
use crate::error::{Error, Result};
use crate::watch::Watch;

/// What a lane is built from.
pub(super) struct Builder<'a> {
    pub(super) control: &'a Arc<Control>,
    pub(super) watch: &'a Arc<Watch>,
    /// Id of the group.
    pub(super) group: u64,
    /// Which of its lanes.
    pub(super) channel: u32,
    /// Group ranks on each host.
    pub(super) hosts: &'a [Vec<usize>],
}

impl Builder<'_> {
    pub(super) fn build(&self) -> Result<Box<dyn Collective>> {
        let _ = (self.control, self.watch, self.group, self.channel, self.hosts);
        Err(Error::NotImplemented("lanes".into()))
    }
}
