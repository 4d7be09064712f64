//! Codecs encode elements into fewer bytes and decode them. Read `minmax_u8` first.
//!
//! Every codec writes **records**: little-endian, a multiple of [`ALIGN`] bytes, with unused bytes set to 0. The record
//! of no elements is empty. Elements are float32, float16 or bfloat16. Arithmetic is in float32, unfused, and rounds
//! half to even.
//!
//! Invariants, quoted by the contract test:
//!
//! 1. **Same bytes everywhere.** A record depends only on the elements, the options and the draw, not on the processor.
//! 2. **Nothing becomes finite silently.** If a codec cannot represent elements, they decode to NaN and `encode` says
//!    so.
//! 3. **No trust.** `decode` checks a record that came from a peer, and never panics.
//! 4. **No allocation once warm.** Encoders keep their temporary data in a [`Scratch`] that the caller reuses.

mod block_i8;
pub mod chunks;
pub mod float;
mod half_float;
mod int4;
mod minmax_u8;
mod onebit;
mod options;
mod simd;
mod sparse;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;

pub use block_i8::BlockI8;
pub use half_float::{Bf16, F16};
pub use int4::Int4;
pub use minmax_u8::MinMaxU8;
pub use onebit::OneBit;
pub use options::{CodecOption, Options};
pub use sparse::{ChunkedTopK, RandomK, TopK};

use crate::error::{Error, Result};
use crate::types::DType;

/// The length of a record is a multiple of this number of bytes.
pub const ALIGN: usize = 32;

/// The parts of a tensor that a collective encodes into one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Two steps (reduce-scatter, all-gather): each member gets a record of its shard from every other, reduces the
    /// shard, and encodes the result again.
    TwoShot,
    /// One step: each member sends one record of the whole tensor to every other, which adds all of them.
    OneShot,
}

/// The state of a record's elements, as found by the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Encoded {
    /// The record represents the elements up to the codec's error.
    Finite,
    /// An element, or a number computed from the elements, is not finite. The elements come back as NaN; with a block
    /// codec, only those of the block.
    NonFinite,
}

/// Memory that encoders keep between calls. Any contents are valid.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Keys or places of elements.
    pub words: Vec<u64>,
    /// Places of elements.
    pub places: Vec<u32>,
}

/// Encodes and decodes elements. Stateless: results depend only on the arguments, and are therefore equal on all ranks.
///
/// # Examples
/// ```
/// use bagua_kernels::codec::{self, Scratch};
/// use bagua_kernels::types::DType;
///
/// let codec = codec::by_name("f16", &[])?;
/// let elements = [1.0_f32, -0.5].map(f32::to_ne_bytes).concat();
/// let mut record = vec![0; codec.record_len(2, DType::F32)];
/// codec.encode(DType::F32, &elements, &mut record, 0, &mut Scratch::default());
/// let mut decoded = vec![0; elements.len()];
/// codec.decode(DType::F32, &record, &mut decoded)?;
/// assert_eq!(decoded, elements);
/// # Ok::<(), bagua_kernels::error::Error>(())
/// ```
pub trait Codec: Send + Sync + Debug {
    /// Returns the codec's code in message headers. Never 0, which stands for no codec.
    fn id(&self) -> u8;

    /// Returns the codec's name.
    fn name(&self) -> &'static str;

    /// Returns all options with their values, always in the same order.
    fn values(&self) -> Vec<(&'static str, CodecOption)> {
        Vec::new()
    }

    /// Returns the options as text, such as "k=0.01,seed=1". Empty without options. Ranks must agree on it.
    fn options(&self) -> String {
        let values: Vec<String> = self.values().iter().map(|(name, value)| format!("{name}={value}")).collect();
        values.join(",")
    }

    /// Returns how a collective uses the codec.
    fn exchange(&self) -> Exchange {
        Exchange::TwoShot
    }

    /// Checks that the codec encodes this element type.
    ///
    /// # Errors
    /// `UnsupportedType` for anything but float32, float16 and bfloat16.
    fn check(&self, dtype: DType) -> Result<()> {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Ok(()),
            _ => Err(Error::UnsupportedType(format!("codec {} cannot encode {}", self.name(), dtype.name()))),
        }
    }

    /// Checks that the codec encodes records of this number of elements.
    ///
    /// # Errors
    /// `InvalidArgument` if its options do not fit the count.
    fn check_count(&self, count: usize) -> Result<()> {
        let _ = count;
        Ok(())
    }

    /// Returns the length in bytes of the record of `count` elements: a multiple of [`ALIGN`], or 0 if `count` is 0.
    fn record_len(&self, count: usize, dtype: DType) -> usize;

    /// Encodes elements into a record of exactly [`Codec::record_len`] bytes, and writes all of them. Addresses need
    /// not be aligned. Codecs that draw at random make the same draws for the same number `draw`.
    ///
    /// # Panics
    /// If the lengths do not fit, or if [`Codec::check`] or [`Codec::check_count`] returns an error.
    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], draw: u64, scratch: &mut Scratch) -> Encoded;

    /// Decodes a record into all of `elements`.
    ///
    /// # Errors
    /// `InvalidArgument` if the record has another length, or contents that no encoder writes.
    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()>;

    /// Returns true if [`Codec::encode_part`] works.
    fn encodes_parts(&self) -> bool {
        false
    }

    /// Encodes the elements from number `first` on into their places in a record, as [`Codec::encode`] does. `first`
    /// must be a multiple of [`PART`], and so must the number of elements, unless they are the last ones of the record.
    ///
    /// # Panics
    /// If the record has fewer elements, or if the codec encodes only whole records.
    fn encode_part(&self, dtype: DType, elements: &[u8], record: &mut [u8], first: usize) -> Encoded {
        let _ = (dtype, elements, record, first);
        unreachable!("{} encodes whole records", self.name());
    }

    /// Returns true if [`Codec::decode_part`] works.
    fn decodes_parts(&self) -> bool {
        false
    }

    /// Decodes the elements from number `first` on, as [`Codec::decode`] does. `first` must be a multiple of [`PART`].
    ///
    /// # Panics
    /// If the record has fewer elements, or if the codec decodes only whole records.
    fn decode_part(&self, dtype: DType, record: &[u8], first: usize, elements: &mut [u8]) {
        let _ = (dtype, record, first, elements);
        unreachable!("{} decodes whole records", self.name());
    }
}

/// The unit of `first` in [`Codec::encode_part`] and [`Codec::decode_part`], in elements.
pub const PART: usize = 4096;

type Make = fn(&mut Options<'_>) -> Result<Arc<dyn Codec>>;

const CODECS: &[(&str, Make)] = &[
    ("minmax_u8", |_| Ok(Arc::new(MinMaxU8))),
    ("f16", |_| Ok(Arc::new(F16))),
    ("bf16", |_| Ok(Arc::new(Bf16))),
    ("block_i8", |options| Ok(Arc::new(BlockI8::new(options)?))),
    ("top_k", sparse::top_k),
    ("random_k", |options| Ok(Arc::new(RandomK::new(options)?))),
    ("onebit", |_| Ok(Arc::new(OneBit))),
    ("int4", |_| Ok(Arc::new(Int4))),
];

/// Names of all codecs.
pub const NAMES: [&str; CODECS.len()] = {
    let mut names = [""; CODECS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = CODECS[at].0;
        at += 1;
    }
    names
};

/// Returns the codec with this name. "MinMaxUInt8" is the original's name for minmax_u8.
///
/// # Errors
/// `InvalidArgument` if the name is unknown (the error lists the known ones) or an option is out of its range;
/// `UnsupportedType` if the codec does not have an option.
pub fn by_name(name: &str, given: &[(String, CodecOption)]) -> Result<Arc<dyn Codec>> {
    let wanted = if name == "MinMaxUInt8" { "minmax_u8" } else { name };
    let Some((_, make)) = CODECS.iter().find(|(known, _)| *known == wanted) else {
        return Err(Error::InvalidArgument(format!("no codec {name:?}; known: {}", NAMES.join(", "))));
    };
    let mut options = Options::new(name, given);
    let codec = make(&mut options)?;
    options.finish()?;
    Ok(codec)
}

/// Returns the name and options of a codec, for error texts and for the comparison between ranks.
pub fn describe(codec: &dyn Codec) -> String {
    let options = codec.options();
    if options.is_empty() { codec.name().to_owned() } else { format!("{}({options})", codec.name()) }
}

/// Returns the name of the instruction level in use, for benchmarks.
pub fn level() -> &'static str {
    simd::Level::best().name()
}

const fn aligned(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// Returns the number of elements, or an error if the length of the record does not fit them.
fn check_len(codec: &dyn Codec, dtype: DType, record: &[u8], elements: &[u8]) -> Result<usize> {
    let count = elements.len() / dtype.size();
    let expected = codec.record_len(count, dtype);
    if record.len() != expected {
        return Err(Error::InvalidArgument(format!(
            "a record of {count} elements of {} with {} has {expected} bytes, not {}",
            dtype.name(),
            codec.name(),
            record.len()
        )));
    }
    Ok(count)
}
