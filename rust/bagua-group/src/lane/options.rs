//! Options of one operation.

use std::time::Duration;

use crate::types::{Shape, flags};

/// Options of one operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Time limit; `None` means the group's default.
    pub timeout: Option<Duration>,
    /// Name of the bucket or another label, for error texts.
    pub label: &'a str,
    /// Shape of the tensor if it matters (all_reduce, reduce, broadcast). `None` means flat.
    pub shape: Option<Shape>,
    /// A 16-bit digest of options that ranks must agree on. A verb over exchange has its own.
    pub tag: u32,
    /// Id of the codec of a compressed collective, or 0. Equal on all ranks. A verb over exchange has its own.
    pub codec: u8,
    /// See [`Fingerprint::flags`](crate::types::Fingerprint::flags).
    pub flags: u16,
}

impl Options<'_> {
    /// The options without a time limit of their own, label, tag, codec or flags.
    pub const DEFAULT: Options<'static> = Options { timeout: None, label: "", shape: None, tag: 0, codec: 0, flags: 0 };
}

impl<'a> Options<'a> {
    /// Returns the options of an operation on a bucket. With `hierarchical`, ranks of one host combine first.
    pub fn of_bucket(label: &'a str, hierarchical: bool) -> Options<'a> {
        Options { label, flags: if hierarchical { flags::HIERARCHICAL } else { 0 }, ..Options::DEFAULT }
    }
}
