//! A stream between two threads of one process: the simplest transport, used by tests.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Arc, Mutex};

use super::{Broken, Mesh, Readiness, Transport};
use crate::wait::{Doorbell, lock};

/// Capacity in bytes of each direction of a [`local_mesh`] stream.
const CAPACITY: usize = 64 << 10;

#[derive(Default)]
struct Pipe {
    /// Bytes that are sent but not received. Never more than the stream's capacity.
    bytes: VecDeque<u8>,
    /// True if one of the two ends was dropped.
    closed: bool,
}

/// One end of a stream between two threads.
pub struct Local {
    /// Bytes that this end sends.
    to: Arc<Mutex<Pipe>>,
    /// Bytes that this end receives.
    from: Arc<Mutex<Pipe>>,
    /// Doorbell of the peer. Rung when there are bytes to receive, when there is room again, and on drop.
    peer: Doorbell,
    /// Maximum length of `Pipe::bytes`.
    capacity: usize,
}

impl Local {
    /// Creates both ends of a stream that holds `capacity` bytes in each direction. `bells.0` belongs to the owner of
    /// the first end.
    pub fn pair(bells: (Doorbell, Doorbell), capacity: usize) -> (Local, Local) {
        assert!(capacity > 0, "a stream needs a capacity");
        let (a, b) = (Arc::<Mutex<Pipe>>::default(), Arc::<Mutex<Pipe>>::default());
        let first = Local { to: a.clone(), from: b.clone(), peer: bells.1, capacity };
        (first, Local { to: b, from: a, peer: bells.0, capacity })
    }
}

fn closed() -> Broken {
    Broken::new("the peer dropped its end")
}

impl Transport for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn send(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Broken> {
        let mut pipe = lock(&self.to);
        if pipe.closed {
            return Err(closed());
        }
        let room = self.capacity - pipe.bytes.len();
        let head = &head[..head.len().min(room)];
        let body = &body[..body.len().min(room - head.len())];
        pipe.bytes.extend(head);
        pipe.bytes.extend(body);
        drop(pipe);
        let sent = head.len() + body.len();
        if sent > 0 {
            self.peer.ring();
        }
        Ok(sent)
    }

    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let mut pipe = lock(&self.from);
        let was_full = pipe.bytes.len() == self.capacity;
        let got = pipe.bytes.read(into).unwrap_or(0);
        if got == 0 && pipe.closed {
            return Err(closed());
        }
        drop(pipe);
        if was_full && got > 0 {
            self.peer.ring();
        }
        Ok(got)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Doorbell
    }

    fn is_wire(&self) -> bool {
        false
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        lock(&self.to).closed = true;
        lock(&self.from).closed = true;
        self.peer.ring();
    }
}

/// Creates the meshes of `n` ranks that are threads of one process.
pub fn local_mesh(n: usize) -> Vec<Mesh> {
    let bells: Vec<Doorbell> = (0..n).map(|_| Doorbell::local()).collect();
    let mut links: Vec<Vec<Option<Box<dyn Transport>>>> = (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
    for a in 0..n {
        for b in a + 1..n {
            let (left, right) = Local::pair((bells[a].clone(), bells[b].clone()), CAPACITY);
            links[a][b] = Some(Box::new(left));
            links[b][a] = Some(Box::new(right));
        }
    }
    let ranks = links.into_iter().zip(bells).enumerate();
    ranks.map(|(rank, (links, bell))| Mesh::new(rank, (0..n).collect(), links, Some(bell))).collect()
}
