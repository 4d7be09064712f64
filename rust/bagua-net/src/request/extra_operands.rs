//! Memory and state that an operation uses in addition to its input and output.

use super::Io;
use crate::codec::{Codec, Scratch};
use crate::memory::BufferMut;

/// Parameters of a compressed all_reduce.
#[derive(Clone, Copy, Debug)]
pub struct Compression<'a> {
    /// Codec for the records that ranks send.
    pub codec: &'a dyn Codec,
    /// Divisor of the sum: the number of ranks for an average, 1 for a sum.
    pub divisor: usize,
    /// Number of the call, which seeds codecs with random rounding. Equal on all members.
    pub draw: u64,
    /// Number of elements that carry values. The others are padding: they count as zeros, and are zero afterwards.
    pub elements: usize,
    /// Number of elements at the end of the padding that carry values after all. They are not encoded: the members add
    /// them in member order, and do not divide them.
    pub exact: usize,
}

/// The weights that the compressed ring assumes on each rank. All three have the weights' length and device.
pub struct Replicas<'a> {
    /// This rank's weights as both neighbours know them.
    pub own: BufferMut<'a>,
    /// The left neighbour's weights (member i - 1) as this rank knows them.
    pub left: BufferMut<'a>,
    /// The right neighbour's weights (member i + 1) as this rank knows them.
    pub right: BufferMut<'a>,
}

impl Replicas<'_> {
    /// Borrows the replicas again for a shorter time.
    pub fn reborrow(&mut self) -> Replicas<'_> {
        Replicas { own: self.own.reborrow(), left: self.left.reborrow(), right: self.right.reborrow() }
    }
}

/// Buffers that are kept between calls, because touching fresh pages costs more than the copies themselves.
#[derive(Debug, Default)]
pub struct Workspace {
    /// The tensor padded with zeros, used if its elements do not divide evenly among the members.
    pub padded: Vec<u8>,
    /// Records that this member sends.
    pub sent: Vec<u8>,
    /// Records or weights received from the other members. Unused on a device, which has its own buffer.
    pub received: Vec<u8>,
    /// Elements decoded from records, or elements about to be encoded.
    pub decoded: Vec<u8>,
    /// The mean before it is encoded.
    pub mean: Vec<u8>,
    /// The new error feedback, kept here until the result is known to be finite.
    pub error: Vec<u8>,
    /// Scratch memory of the encoder.
    pub scratch: Scratch,
}

/// Memory and state of one operation. Each [`super::Verb`] says which fields it uses.
#[derive(Default)]
pub struct Extra<'a> {
    /// Error feedback of a compressed all_reduce: one float32 in host memory for each element that carries a value.
    /// Under `hier`, only the first rank of each host uses it.
    pub error: Option<BufferMut<'a>>,
    /// Replicas of the compressed ring. Under `hier`, the first rank of each host has all three, and the other ranks of
    /// the host get only `own`.
    pub replicas: Option<Replicas<'a>>,
    /// Buffers kept between calls. If `None`, the call allocates its own.
    pub work: Option<&'a mut Workspace>,
}

/// The buffers of an operation together with its [`Extra`].
pub struct Operands<'a> {
    /// Input and output.
    pub io: Io<'a>,
    /// Memory and state in addition to input and output.
    pub extra: Extra<'a>,
}

impl<'a> From<Io<'a>> for Operands<'a> {
    fn from(io: Io<'a>) -> Operands<'a> {
        Operands { io, extra: Extra::default() }
    }
}
