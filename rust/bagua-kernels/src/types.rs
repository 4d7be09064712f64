//! Types that every crate uses: element types, reduce operations, kinds of operations, and the fingerprint by which
//! ranks compare their operations.

use crate::error::{Error, Result};

/// Declares an enumeration whose variants each have a code and a name. A single list gives the type, the list of values
/// in the order of their codes, and the conversions.
#[macro_export]
macro_rules! coded {
    ($(#[$about:meta])* $Type:ident { $($(#[$doc:meta])* $Variant:ident = $code:literal, $name:literal;)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $Type {
            $($(#[$doc])* $Variant = $code,)*
        }

        impl $Type {
            /// All values, in the order of their codes.
            pub const ALL: [$Type; [$($code),*].len()] = [$($Type::$Variant),*];

            /// Returns the value's lower-case name, as the Python API spells it.
            pub const fn name(self) -> &'static str {
                match self {
                    $($Type::$Variant => $name,)*
                }
            }

            /// Returns the value with this code, or `None` if no value has it.
            pub const fn from_code(code: u8) -> Option<$Type> {
                match code {
                    $($code => Some($Type::$Variant),)*
                    _ => None,
                }
            }

            /// Returns the value with this name. `what` says in the error what kind of name was expected.
            ///
            /// # Errors
            /// `InvalidArgument` that lists the known names.
            pub fn by_name(what: &str, name: &str) -> $crate::error::Result<$Type> {
                $Type::ALL.into_iter().find(|value| value.name() == name).ok_or_else(|| {
                    let known = $Type::ALL.map($Type::name).join(", ");
                    $crate::error::Error::InvalidArgument(format!("no {what} '{name}'; known: {known}"))
                })
            }
        }
    };
}

coded! {
    /// Element type of a tensor. Message headers contain its code.
    DType {
        /// IEEE 754 binary16.
        F16 = 0, "float16";
        /// bfloat16: the upper half of a binary32.
        BF16 = 1, "bfloat16";
        /// IEEE 754 binary32.
        F32 = 2, "float32";
        /// IEEE 754 binary64.
        F64 = 3, "float64";
        /// Unsigned byte.
        U8 = 4, "uint8";
        /// Signed byte.
        I8 = 5, "int8";
        /// Signed 32-bit integer.
        I32 = 6, "int32";
        /// Signed 64-bit integer.
        I64 = 7, "int64";
        /// One byte, 0 or 1.
        Bool = 8, "bool";
        /// Two IEEE 754 binary32: real and imaginary part.
        C64 = 9, "complex64";
        /// Two IEEE 754 binary64: real and imaginary part.
        C128 = 10, "complex128";
        /// Signed 16-bit integer.
        I16 = 11, "int16";
        /// Unsigned 16-bit integer.
        U16 = 12, "uint16";
        /// Unsigned 32-bit integer.
        U32 = 13, "uint32";
        /// Unsigned 64-bit integer.
        U64 = 14, "uint64";
    }
}

impl DType {
    /// Returns the number of bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 | DType::I8 | DType::Bool => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 | DType::C64 => 8,
            DType::C128 => 16,
        }
    }

    /// Returns the number of elements in `bytes` bytes. `what` names the bytes in the error.
    ///
    /// # Errors
    /// `InvalidArgument` if that is not a whole number.
    pub fn elements_in(self, bytes: usize, what: &str) -> Result<usize> {
        if !bytes.is_multiple_of(self.size()) {
            return Err(Error::InvalidArgument(format!(
                "{what} has {bytes} bytes, not a whole number of {} elements",
                self.name()
            )));
        }
        Ok(bytes / self.size())
    }

    /// True for the complex types.
    pub const fn is_complex(self) -> bool {
        matches!(self, DType::C64 | DType::C128)
    }

    /// True for the real floating-point types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }
}

/// The element types that a reduction is defined for. Combinations without a single meaning are left out: the average
/// of integers or bool, the sum of bool, bit operations on floats, and an order of complex numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementTypes {
    /// Every type.
    All,
    /// Numbers: all but bool.
    Numbers,
    /// Types whose values have an order: all but complex.
    Ordered,
    /// Integers and bool.
    Bits,
    /// Real and complex floating-point types.
    Inexact,
}

/// Declares the reductions, each with its element types.
macro_rules! reductions {
    ($(#[$about:meta])* $Type:ident {
        $($(#[$doc:meta])* $Variant:ident = $code:literal, $name:literal, $element_types:ident;)*
    }) => {
        coded! { $(#[$about])* $Type { $($(#[$doc])* $Variant = $code, $name;)* } }

        impl $Type {
            /// Returns the element types that the reduction is defined for.
            pub const fn element_types(self) -> ElementTypes {
                match self {
                    $($Type::$Variant => ElementTypes::$element_types,)*
                }
            }
        }
    };
}

reductions! {
    /// Operation that combines the elements of several ranks. The codes are those of the original Bagua's `ReduceOp`.
    ReduceOp {
        /// x0 + x1 + …, in rank order.
        Sum = 0, "sum", Numbers;
        /// x0 * x1 * …, in rank order. For complex numbers, (a + bi)(c + di) = (ac - bd) + (ad + bc)i, with each
        /// product and sum rounded.
        Product = 1, "product", All;
        /// The smallest. A NaN in any rank's element gives NaN.
        Min = 2, "min", Ordered;
        /// The largest. A NaN in any rank's element gives NaN.
        Max = 3, "max", Ordered;
        /// Bitwise or; for bool, any.
        Bor = 7, "bor", Bits;
        /// Bitwise and; for bool, all.
        Band = 8, "band", Bits;
        /// Bitwise exclusive or; for bool, parity.
        Bxor = 9, "bxor", Bits;
        /// The average: the sum over all ranks, divided once by the number of ranks.
        Avg = 10, "avg", Inexact;
    }
}

impl ReduceOp {
    /// Returns the operation for a partial result. For an average this is the sum, which is divided once at the end.
    #[must_use]
    pub const fn undivided(self) -> ReduceOp {
        match self {
            ReduceOp::Avg => ReduceOp::Sum,
            other => other,
        }
    }

    /// Checks that the reduction is defined for this element type.
    ///
    /// # Errors
    /// `UnsupportedType`, naming operation and type.
    pub fn check(self, dtype: DType) -> Result<()> {
        let inexact = dtype.is_float() || dtype.is_complex();
        let refused = match self.element_types() {
            ElementTypes::All => false,
            ElementTypes::Numbers => dtype == DType::Bool,
            ElementTypes::Ordered => dtype.is_complex(),
            ElementTypes::Bits => inexact,
            ElementTypes::Inexact => !inexact,
        };
        if refused {
            return Err(Error::UnsupportedType(format!("{} of {} is not defined", self.name(), dtype.name())));
        }
        Ok(())
    }
}

coded! {
    /// Kind of an operation. Message headers contain its code.
    #[allow(missing_docs)]
    Kind {
        AllReduce = 1, "all_reduce";
        Reduce = 2, "reduce";
        Broadcast = 3, "broadcast";
        AllGather = 4, "all_gather";
        Gather = 5, "gather";
        Scatter = 6, "scatter";
        ReduceScatter = 7, "reduce_scatter";
        AllToAll = 8, "all_to_all";
        AllToAllV = 9, "all_to_all_v";
        /// Both ends of a point-to-point message.
        Send = 10, "send/recv";
        Exchange = 11, "exchange";
        Barrier = 12, "barrier";
        CompressedAllReduce = 13, "compressed_all_reduce";
        Gossip = 14, "gossip";
    }
}

/// The number of dimensions of a tensor and the first four of them, for fingerprints and error texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Number of dimensions of the tensor (saturating at 255).
    pub ndim: u8,
    /// The first four dimensions, each saturating at `u32::MAX`.
    pub dims: [u32; 4],
}

impl Shape {
    /// Returns the shape of a tensor with these dimensions.
    pub fn new<T: Copy + TryInto<u32>>(dims: &[T]) -> Shape {
        let mut first = [0; 4];
        for (slot, dim) in first.iter_mut().zip(dims) {
            *slot = (*dim).try_into().unwrap_or(u32::MAX);
        }
        Shape { ndim: u8::try_from(dims.len()).unwrap_or(u8::MAX), dims: first }
    }

    /// Returns the shape of a vector of `count` elements.
    pub fn flat(count: usize) -> Shape {
        Shape::new(&[count])
    }

    /// True if all dimensions are known and a tensor of this shape has `count` elements.
    fn has(&self, count: u64) -> bool {
        let known = self.dims.get(..usize::from(self.ndim));
        known.is_some_and(|dims| dims.iter().map(|dim| u128::from(*dim)).product::<u128>() == u128::from(count))
    }
}

/// The description of an operation that ranks compare: the part of a message header that must be equal on both sides.
///
/// If the descriptions differ, both sides raise [`Error::Mismatch`] instead of hanging or using wrong data.
///
/// # Examples
/// ```
/// use bagua_kernels::types::{DType, Fingerprint, Kind, Shape};
///
/// let own = Fingerprint { seq: 17, shape: Shape::new(&[10, 100]), ..Fingerprint::new(Kind::Broadcast, DType::F32, 1000) };
/// let peers = Fingerprint { seq: 18, ..own };
/// assert_ne!(own, peers);
/// assert_eq!(own.to_string(), "broadcast number 17 of float32[10, 100]");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Random number of the world group. A message of a group that was built earlier or later is a mismatch.
    pub epoch: u32,
    /// Number of the lane in the group. Each engine has its own lane.
    pub lane: u32,
    /// Kind of the operation.
    pub kind: Kind,
    /// Number of earlier operations of this lane. For `Send`, number of earlier messages between the two ranks.
    pub seq: u64,
    /// Element type.
    pub dtype: DType,
    /// Reduce operation, if the kind has one.
    pub op: Option<ReduceOp>,
    /// Group rank that sends or receives everything, if the kind has one.
    pub root: Option<u32>,
    /// Number of elements, as the kind counts them. 0 if it may differ between ranks (`AllToAllV`).
    pub count: u64,
    /// Shape of the tensor, if the kind requires equal shapes.
    pub shape: Shape,
    /// Tag of a message. For a collective with further options, a digest of them. Otherwise 0.
    pub tag: u32,
    /// Id of the codec that compresses the data, or 0.
    pub codec: u8,
    /// Kind of the device that holds the tensor, or 0 for the host.
    pub device: u8,
    /// Options of the operation in which ranks could differ: the sum of some constants of [`flags`].
    pub flags: u16,
    /// Number of the operation's training step, from 1 on: see [`compared_step`]. 0 if steps are not compared.
    pub step: u32,
}

/// Bit that [`compared_step`] sets in a step number if the rank has loaded a state since it last communicated.
const AFTER_LOAD: u32 = 1 << 31;

/// Returns the step number that ranks compare. `after_load` is true if this rank has loaded a state since it last
/// communicated. The number then differs from that of the same step on a rank that has not.
#[must_use]
pub fn compared_step(step: u32, after_load: bool) -> u32 {
    if after_load && step > 0 { step | AFTER_LOAD } else { step }
}

/// Values of [`Fingerprint::flags`].
pub mod flags {
    /// Ranks of one host combine first, even if the group would choose a flat collective.
    pub const HIERARCHICAL: u16 = 1;
}

impl Fingerprint {
    /// Creates the fingerprint of the first operation of a kind on lane 0 of a group, on the host, without a shape.
    pub fn new(kind: Kind, dtype: DType, count: usize) -> Fingerprint {
        Fingerprint {
            epoch: 0,
            lane: 0,
            kind,
            seq: 0,
            dtype,
            op: None,
            root: None,
            count: count as u64,
            shape: Shape::default(),
            tag: 0,
            codec: 0,
            device: 0,
            flags: 0,
            step: 0,
        }
    }

    /// True if `theirs`, the text of a peer's fingerprint, names another step.
    pub fn is_of_another_step(&self, theirs: &str) -> bool {
        let step = theirs.rsplit_once(IN_STEP).map(|(_, step)| step);
        self.step > 0 && step.is_some_and(|step| step != self.step_text())
    }

    fn step_text(&self) -> String {
        let after = if self.step & AFTER_LOAD == 0 { "" } else { ", the first after a state was loaded" };
        format!("{}{after}", self.step & !AFTER_LOAD)
    }
}

/// Text before the step number at the end of a fingerprint's text.
const IN_STEP: &str = " in step ";

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind.name())?;
        match (self.op, self.root) {
            (Some(op), Some(root)) => write!(f, "({}, root {root})", op.name())?,
            (Some(op), None) => write!(f, "({})", op.name())?,
            (None, Some(root)) => write!(f, "(root {root})")?,
            (None, None) => {}
        }
        write!(f, " number {} of {}", self.seq, self.dtype.name())?;
        let shown = usize::from(self.shape.ndim).min(4);
        let dims: Vec<String> = self.shape.dims[..shown].iter().map(u32::to_string).collect();
        let more = if self.shape.ndim > 4 { ", …" } else { "" };
        write!(f, "[{}{more}]", dims.join(", "))?;
        if !self.shape.has(self.count) {
            write!(f, ", {} elements", self.count)?;
        }
        let extras = [("tag", self.tag), ("codec", self.codec.into()), ("device kind", self.device.into())];
        for (name, value) in extras.into_iter().filter(|(_, value)| *value > 0) {
            write!(f, ", {name} {value}")?;
        }
        let hierarchical = if self.flags & flags::HIERARCHICAL == 0 { "" } else { ", hierarchical" };
        write!(f, "{hierarchical}")?;
        // Flight records and traces call a lane a channel. The first lane is the group's own. The epoch is left out,
        // because users do not know it.
        if self.lane > 0 {
            write!(f, " (channel {})", self.lane)?;
        }
        if self.step > 0 { write!(f, "{IN_STEP}{}", self.step_text()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_shows_its_channel_and_a_count_only_if_the_shape_does_not_give_it() {
        let shown = |dims: &[usize], count, lane| {
            let shape = Shape::new(dims);
            Fingerprint { lane, shape, ..Fingerprint::new(Kind::Barrier, DType::F32, count) }.to_string()
        };
        for (dims, count, lane, text) in [
            (&[2, 3][..], 6, 0, "[2, 3]"),
            (&[], 1, 0, "[]"),
            (&[6], 6, 2, "[6] (channel 2)"),
            (&[6], 2, 1, "[6], 2 elements (channel 1)"),
            (&[1, 1, 1, 1, 2], 2, 0, "[1, 1, 1, 1, …], 2 elements"),
            (&[1 << 32], 1 << 32, 0, "[4294967295], 4294967296 elements"),
        ] {
            assert_eq!(shown(dims, count, lane), format!("barrier number 0 of float32{text}"));
        }
    }
}
