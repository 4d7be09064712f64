//! The streams of messages between the ranks of one host: byte rings in the segment, see [`crate::transport::shm`].
//!
//! A rank makes its ends with its first message. Most lanes never carry one, and a rank of a large host has many peers: for 1,024 ranks the
//! ends are a megabyte of a rank's memory, which it would make and drop again with each view.

use std::sync::Arc;

use crate::memory::Arena;
use crate::transport::Mesh;
use crate::transport::shm::{close_rings, ring_links};

/// This rank's ends of the rings. A peer may write to a ring before this rank has made its end.
pub(super) struct Messages {
    arena: Arc<Arena>,
    /// Of the rings in the arena.
    offset: usize,
    /// This rank, on this host.
    index: usize,
    /// Group ranks by index.
    members: Vec<usize>,
    /// `None` before the first message.
    mesh: Option<Mesh>,
}

impl Messages {
    pub(super) fn new(arena: Arc<Arena>, offset: usize, index: usize, members: Vec<usize>) -> Messages {
        Messages { arena, offset, index, members, mesh: None }
    }

    pub(super) fn mesh(&mut self) -> &mut Mesh {
        let Messages { arena, offset, index, members, mesh } = self;
        mesh.get_or_insert_with(|| {
            let (links, bell) = ring_links(arena, *offset, *index, members.len());
            Mesh::new(*index, members.clone(), links, Some(bell))
        })
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        if self.mesh.is_none() {
            close_rings(&self.arena, self.offset, self.index, self.members.len());
        }
    }
}
