//! What an operation works with beside its input and output.

use super::Io;
use crate::codec::{Codec, Scratch};
use crate::memory::BufferMut;

/// How a compressed all_reduce combines a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Compression<'a> {
    /// Encodes it.
    pub codec: &'a dyn Codec,
    /// What the sum is divided by: the ranks of the group for an average, 1 for a sum.
    pub divisor: usize,
    /// Number of the call, for codecs that draw at random; equal on all members.
    pub draw: u64,
    /// Elements in front that carry values. The others are padding: taken as zeros, and zeros afterwards.
    pub elements: usize,
}

/// Replicas of the compressed ring, each of the length of the weights and in the same place: what the neighbours know.
pub struct Replicas<'a> {
    /// Own weights as both neighbours have them.
    pub own: BufferMut<'a>,
    /// Those of the left neighbour, member i - 1.
    pub left: BufferMut<'a>,
    /// Those of the right neighbour, member i + 1.
    pub right: BufferMut<'a>,
}

impl Replicas<'_> {
    /// The same for a shorter time.
    pub fn reborrow(&mut self) -> Replicas<'_> {
        Replicas { own: self.own.reborrow(), left: self.left.reborrow(), right: self.right.reborrow() }
    }
}

/// Memory that is kept between calls, because fresh pages cost more than the copies.
#[derive(Debug, Default)]
pub struct Workspace {
    /// The tensor and the zeros behind it, where its elements do not divide by the members.
    pub padded: Vec<u8>,
    /// Records of this member.
    pub sent: Vec<u8>,
    /// Records or weights of the other members; on a device, memory of its own takes the place of this.
    pub received: Vec<u8>,
    /// Elements that records decode to, or that are encoded next.
    pub decoded: Vec<u8>,
    /// A mean before it is encoded.
    pub mean: Vec<u8>,
    /// The error after this call, until it is known that the result is finite.
    pub error: Vec<u8>,
    /// The encoder's.
    pub scratch: Scratch,
}

/// See the module. Each verb says what it uses.
#[derive(Default)]
pub struct Extra<'a> {
    /// Error feedback of a compressed all_reduce: one float32 in memory for each element that carries a value. By host only a host's first
    /// rank uses it.
    pub error: Option<BufferMut<'a>>,
    /// Of the compressed ring. By host only a host's first rank knows its neighbours; the others get `own`.
    pub replicas: Option<Replicas<'a>>,
    /// Without it memory is allocated for the one call.
    pub work: Option<&'a mut Workspace>,
}

/// The buffers of an operation and what it works with beside them.
pub struct Operands<'a> {
    /// Input and output.
    pub io: Io<'a>,
    /// What else it works with.
    pub extra: Extra<'a>,
}

impl<'a> From<Io<'a>> for Operands<'a> {
    fn from(io: Io<'a>) -> Operands<'a> {
        Operands { io, extra: Extra::default() }
    }
}
