//! The streams of messages between the ranks of one host: byte rings in the segment, see [`crate::transport::shm`].
//!
//! A rank creates its ends with its first message, because most lanes never carry one and the ends take memory: about a
//! megabyte in a rank with 1,024 ranks on its host, which it would create and drop with each view.

use std::sync::Arc;

use crate::memory::Arena;
use crate::transport::Mesh;
use crate::transport::shm::{close_rings, ring_links};

/// This rank's ends of the rings. A peer may write to a ring before this rank has created its end.
pub(super) struct Messages {
    arena: Arc<Arena>,
    offset: usize,
    index: usize,
    members: Vec<usize>,
    /// Mesh over the rings, or `None` before the first message.
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
