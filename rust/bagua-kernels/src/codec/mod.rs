//! How elements become fewer bytes and come back: one trait, one file or folder per codec. `minmax_u8` is the one to read first.
//!
//! Every codec writes **records**: little-endian, a multiple of [`ALIGN`] bytes, all bytes that carry nothing 0. No elements make no
//! bytes. Element types are float32, float16 and bfloat16; arithmetic is float32, unfused, rounding half to even.
//!
//! Invariants, quoted by the contract test:
//!
//! 1. **Same bytes everywhere.** A record depends on the elements, the options and the draw alone, not on the processor.
//! 2. **Nothing becomes finite silently.** What a codec cannot express comes back as NaN, and `encode` says so.
//! 3. **No trust.** `decode` checks a record that came from a peer and never panics.
//! 4. **No allocation once warm.** What an encoder needs beside its arguments is in a [`Scratch`] that the caller keeps.

mod block_i8;
pub mod chunks;
pub mod float;
mod half_float;
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
pub use minmax_u8::MinMaxU8;
pub use onebit::OneBit;
pub use options::{CodecOption, Options};
pub use sparse::{RandomK, TopK};

use crate::error::{Error, Result};
use crate::types::DType;

/// Records have a multiple of this many bytes.
pub const ALIGN: usize = 32;

/// Which bytes of a collective are encoded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// A record for each member's shard; members reduce their shard and encode the result again (reduce-scatter, all-gather).
    TwoShot,
    /// One record of the whole tensor from each member to every other, which adds all of them.
    OneShot,
}

/// What an encoder finds out about the elements of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Encoded {
    /// The record says what the elements were, within the codec's error.
    Finite,
    /// Some element, or a quantity made of them, is not finite: the elements come back as NaN (those of one block of a block codec).
    NonFinite,
}

/// Memory of encoders, kept between calls. Any contents are valid.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Keys or places of elements.
    pub words: Vec<u64>,
    /// Places of elements.
    pub places: Vec<u32>,
}

/// Encodes and decodes elements. Stateless: what must be equal on all ranks, and what comes back, follows from the arguments.
pub trait Codec: Send + Sync + Debug {
    /// Code in message headers; never 0, which is no codec.
    fn id(&self) -> u8;

    /// Registered name.
    fn name(&self) -> &'static str;

    /// The options with their values, all of them and always in one order.
    fn values(&self) -> Vec<(&'static str, CodecOption)> {
        Vec::new()
    }

    /// The options as text, such as "k=0.01,seed=1"; empty without options. Ranks must agree on it.
    fn options(&self) -> String {
        let values: Vec<String> = self.values().iter().map(|(name, value)| format!("{name}={value}")).collect();
        values.join(",")
    }

    /// How a collective uses it.
    fn exchange(&self) -> Exchange {
        Exchange::TwoShot
    }

    /// Whether it encodes this element type.
    ///
    /// # Errors
    /// `UnsupportedType` for anything but float32, float16 and bfloat16.
    fn check(&self, dtype: DType) -> Result<()> {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Ok(()),
            _ => Err(Error::UnsupportedType(format!("codec {} cannot encode {}", self.name(), dtype.name()))),
        }
    }

    /// Whether it encodes records of so many elements.
    ///
    /// # Errors
    /// `InvalidArgument` when its options do not fit the count.
    fn check_count(&self, count: usize) -> Result<()> {
        let _ = count;
        Ok(())
    }

    /// Bytes of the record of `count` elements: a multiple of [`ALIGN`], 0 for 0.
    fn record_len(&self, count: usize, dtype: DType) -> usize;

    /// Encodes elements into a record of exactly [`Codec::record_len`] bytes, all of which it writes. Any addresses are aligned.
    /// `draw` is the number of the call for codecs that draw at random: the same number makes the same draws.
    ///
    /// # Panics
    /// When the lengths do not fit, or `check` or `check_count` would have refused.
    fn encode(&self, dtype: DType, elements: &[u8], record: &mut [u8], draw: u64, scratch: &mut Scratch) -> Encoded;

    /// Decodes a record into all of `elements`.
    ///
    /// # Errors
    /// `InvalidArgument` for a record of another length, or whose contents no encoder writes.
    fn decode(&self, dtype: DType, record: &[u8], elements: &mut [u8]) -> Result<()>;

    /// Whether [`Codec::decode_part`] works.
    fn decodes_parts(&self) -> bool {
        false
    }

    /// Decodes the elements from number `first` on, a multiple of [`PART`], without the ones before: the bits of [`Codec::decode`].
    ///
    /// # Panics
    /// When the record has fewer elements, or the codec decodes whole records only.
    fn decode_part(&self, dtype: DType, record: &[u8], first: usize, elements: &mut [u8]) {
        let _ = (dtype, record, first, elements);
        unreachable!("{} decodes whole records", self.name());
    }
}

/// Elements that [`Codec::decode_part`] counts in.
pub const PART: usize = 4096;

/// Makes a codec of its options.
type Make = fn(&mut Options<'_>) -> Result<Arc<dyn Codec>>;

/// Every codec, by its name.
const CODECS: &[(&str, Make)] = &[
    ("minmax_u8", |_| Ok(Arc::new(MinMaxU8))),
    ("f16", |_| Ok(Arc::new(F16))),
    ("bf16", |_| Ok(Arc::new(Bf16))),
    ("block_i8", |options| Ok(Arc::new(BlockI8::new(options)?))),
    ("top_k", |options| Ok(Arc::new(TopK::new(options)?))),
    ("random_k", |options| Ok(Arc::new(RandomK::new(options)?))),
    ("onebit", |_| Ok(Arc::new(OneBit))),
];

/// The names of all codecs.
pub const NAMES: [&str; CODECS.len()] = {
    let mut names = [""; CODECS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = CODECS[at].0;
        at += 1;
    }
    names
};

/// The codec of this name ("MinMaxUInt8" is the original's for minmax_u8).
///
/// # Errors
/// `InvalidArgument` for an unknown name (it lists the known ones) or an option out of its range, `UnsupportedType` for an option
/// that the codec does not have.
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

/// Name and options, for error texts and for the comparison between ranks.
pub fn describe(codec: &dyn Codec) -> String {
    let options = codec.options();
    if options.is_empty() { codec.name().to_owned() } else { format!("{}({options})", codec.name()) }
}

/// The name of the level of instructions in use, for benchmarks.
pub fn level() -> &'static str {
    simd::Level::best().name()
}

/// `len` rounded up to a multiple of [`ALIGN`].
const fn aligned(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// Refuses a record of another length than `elements` make.
fn check_len(codec: &dyn Codec, dtype: DType, record: &[u8], elements: &[u8]) -> Result<usize> {
    let count = elements.len() / dtype.size();
    let expected = codec.record_len(count, dtype);
    if record.len() != expected {
        return Err(Error::InvalidArgument(format!(
            "a record of {count} elements of {} in {} has {expected} bytes, not {}",
            dtype.name(),
            codec.name(),
            record.len()
        )));
    }
    Ok(count)
}
