//! The header of every frame on a stream, for collectives and tagged messages: 104 bytes, little-endian.
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0..4 | magic | `BGW4` |
//! | 4 | kind | code of [`Kind`] |
//! | 5 | dtype | code of [`DType`] |
//! | 6 | op | code of [`ReduceOp`], 255 for none |
//! | 7 | ndim | dimensions of the tensor, saturating |
//! | 8..12 | epoch | |
//! | 12..16 | lane | |
//! | 16..20 | root | `u32::MAX` for none |
//! | 20..24 | part | number of the message within the operation |
//! | 24..32 | seq | |
//! | 32..40 | count | |
//! | 40..48 | body | bytes of the whole message |
//! | 48..64 | dims | four times u32 |
//! | 64..68 | tag | 0 for collectives |
//! | 68 | codec | id of the codec, 0 for none |
//! | 69 | device | kind of the device, 0 for the host |
//! | 70..72 | flags | see [`crate::types::flags`] |
//! | 72 | frame | code of [`FrameKind`] |
//! | 73..76 | reserved | 0 |
//! | 76..80 | step | training step, 0 if steps are not compared |
//! | 80..88 | message | number of the message among all from this sender to this peer |
//! | 88..96 | offset | position in the message of the bytes that follow |
//! | 96..104 | length | number of bytes that follow |

use crate::types::{DType, Fingerprint, Kind, ReduceOp, Shape};

/// Size of a header in bytes.
pub const LEN: usize = 104;

/// First four bytes of every header. The digit is the version of the wire format.
pub const MAGIC: u32 = u32::from_le_bytes(*b"BGW4");

const NO_OP: u8 = 255;
const NO_ROOT: u32 = u32::MAX;

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Bytes of a message that the receiver expects.
    Data = 0,
    /// The sender has a message, and sends its bytes after [`FrameKind::Ready`].
    Offer = 1,
    /// The sender has a message, and sends all its bytes with this frame.
    Eager = 2,
    /// The receiver has memory for an offered message, or has taken an eager one.
    Ready = 3,
    /// The sender sends no more messages.
    End = 4,
}

impl FrameKind {
    /// All kinds, in the order of their codes.
    pub const ALL: [FrameKind; 5] =
        [FrameKind::Data, FrameKind::Offer, FrameKind::Eager, FrameKind::Ready, FrameKind::End];
}

/// The content of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Description of the operation.
    pub fingerprint: Fingerprint,
    /// Number of the message within the operation.
    pub part: u32,
    /// Bytes of the whole message.
    pub body: u64,
    /// Purpose of the frame.
    pub frame: FrameKind,
    /// Number of the message.
    pub message: u64,
    /// Position in the message of the bytes that follow.
    pub offset: u64,
    /// Number of bytes that follow.
    pub length: u64,
}

/// The reason why 104 bytes are not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    /// The bytes belong to another protocol or version, or do not start at a frame.
    #[error("no message of this protocol (it begins with {0:#010x}, not {MAGIC:#010x})")]
    Magic(u32),
    /// No kind of operation has this code.
    #[error("an unknown operation (code {0})")]
    Kind(u8),
    /// No element type has this code.
    #[error("an unknown element type (code {0})")]
    DType(u8),
    /// No reduce operation has this code.
    #[error("an unknown reduce operation (code {0})")]
    Op(u8),
    /// No kind of frame has this code.
    #[error("an unknown kind of frame (code {0})")]
    Frame(u8),
    /// Reserved bytes are not 0.
    #[error("reserved bytes of the header are not 0")]
    Reserved,
}

impl Header {
    /// Creates the header of a whole message in one frame.
    pub fn whole(fingerprint: Fingerprint, part: u32, body: usize, message: u64) -> Header {
        let body = body as u64;
        Header { fingerprint, part, body, frame: FrameKind::Data, message, offset: 0, length: body }
    }

    /// True if the bytes that follow lie within their message, and are empty only if the message is.
    pub fn fits(&self) -> bool {
        let end = self.offset.checked_add(self.length);
        end.is_some_and(|end| end <= self.body) && (self.length > 0 || self.body == 0)
    }

    /// Returns the header's bytes on the wire.
    pub fn encode(&self) -> [u8; LEN] {
        let f = &self.fingerprint;
        let mut out = [0; LEN];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = f.kind as u8;
        out[5] = f.dtype as u8;
        out[6] = f.op.map_or(NO_OP, |op| op as u8);
        out[7] = f.shape.ndim;
        out[8..12].copy_from_slice(&f.epoch.to_le_bytes());
        out[12..16].copy_from_slice(&f.lane.to_le_bytes());
        out[16..20].copy_from_slice(&f.root.unwrap_or(NO_ROOT).to_le_bytes());
        out[20..24].copy_from_slice(&self.part.to_le_bytes());
        out[24..32].copy_from_slice(&f.seq.to_le_bytes());
        out[32..40].copy_from_slice(&f.count.to_le_bytes());
        out[40..48].copy_from_slice(&self.body.to_le_bytes());
        for (slot, dim) in out[48..64].chunks_exact_mut(4).zip(f.shape.dims) {
            slot.copy_from_slice(&dim.to_le_bytes());
        }
        out[64..68].copy_from_slice(&f.tag.to_le_bytes());
        out[68] = f.codec;
        out[69] = f.device;
        out[70..72].copy_from_slice(&f.flags.to_le_bytes());
        out[72] = self.frame as u8;
        out[76..80].copy_from_slice(&f.step.to_le_bytes());
        for (slot, value) in out[80..].chunks_exact_mut(8).zip([self.message, self.offset, self.length]) {
            slot.copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// Reads the bytes written by [`Header::encode`].
    ///
    /// # Errors
    /// `BadFrame` for bytes that `encode` cannot have written. Fields without a code may hold any value.
    pub fn decode(bytes: &[u8; LEN]) -> Result<Header, BadFrame> {
        let magic = u32_at(bytes, 0);
        if magic != MAGIC {
            return Err(BadFrame::Magic(magic));
        }
        let op = match bytes[6] {
            NO_OP => None,
            code => Some(ReduceOp::from_code(code).ok_or(BadFrame::Op(code))?),
        };
        let root = u32_at(bytes, 16);
        let fingerprint = Fingerprint {
            epoch: u32_at(bytes, 8),
            lane: u32_at(bytes, 12),
            kind: Kind::from_code(bytes[4]).ok_or(BadFrame::Kind(bytes[4]))?,
            seq: u64_at(bytes, 24),
            dtype: DType::from_code(bytes[5]).ok_or(BadFrame::DType(bytes[5]))?,
            op,
            root: (root != NO_ROOT).then_some(root),
            count: u64_at(bytes, 32),
            shape: Shape { ndim: bytes[7], dims: [0, 1, 2, 3].map(|i| u32_at(bytes, 48 + 4 * i)) },
            tag: u32_at(bytes, 64),
            codec: bytes[68],
            device: bytes[69],
            flags: u16::from_le_bytes([bytes[70], bytes[71]]),
            step: u32_at(bytes, 76),
        };
        let frame = *FrameKind::ALL.get(usize::from(bytes[72])).ok_or(BadFrame::Frame(bytes[72]))?;
        if bytes[73..76] != [0; 3] {
            return Err(BadFrame::Reserved);
        }
        let [message, offset, length] = [80, 88, 96].map(|at| u64_at(bytes, at));
        Ok(Header { fingerprint, part: u32_at(bytes, 20), body: u64_at(bytes, 40), frame, message, offset, length })
    }
}

fn u32_at(bytes: &[u8; LEN], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; LEN], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn example() -> Header {
        Header {
            fingerprint: Fingerprint {
                epoch: 0x0102_0304,
                lane: 5,
                kind: Kind::Reduce,
                seq: 0x1112_1314_1516_1718,
                dtype: DType::BF16,
                op: Some(ReduceOp::Avg),
                root: Some(6),
                count: 0x2122_2324_2526_2728,
                shape: Shape::new(&[7, 8, 9]),
                tag: 0x4142_4344,
                codec: 11,
                device: 12,
                flags: 0x5152,
                step: 0x6162_6364,
            },
            part: 10,
            body: 0x3132_3334_3536_3738,
            frame: FrameKind::Eager,
            message: 0x0102_0304_0506_0708,
            offset: 60,
            length: 40,
        }
    }

    #[test]
    fn the_golden_bytes_of_a_header_never_change() {
        let golden: [u8; LEN] = [
            b'B', b'G', b'W', b'4', 2, 1, 10, 3, 4, 3, 2, 1, 5, 0, 0, 0, //
            6, 0, 0, 0, 10, 0, 0, 0, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, //
            0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, 0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, //
            7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, //
            0x44, 0x43, 0x42, 0x41, 11, 12, 0x52, 0x51, 2, 0, 0, 0, 0x64, 0x63, 0x62, 0x61, //
            8, 7, 6, 5, 4, 3, 2, 1, 60, 0, 0, 0, 0, 0, 0, 0, 40, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(example().encode(), golden);
        assert_eq!(Header::decode(&golden), Ok(example()));
    }

    #[test]
    fn each_bad_field_has_its_own_error() {
        let spoiled = |at: usize, value: u8| {
            let mut bytes = example().encode();
            bytes[at] = value;
            Header::decode(&bytes)
        };
        assert_eq!(spoiled(3, b'2'), Err(BadFrame::Magic(u32::from_le_bytes(*b"BGW2"))));
        assert_eq!(spoiled(4, 0), Err(BadFrame::Kind(0)));
        assert_eq!(spoiled(4, 15), Err(BadFrame::Kind(15)));
        assert_eq!(spoiled(5, 99), Err(BadFrame::DType(99)));
        assert_eq!(spoiled(6, 4), Err(BadFrame::Op(4)));
        assert_eq!(spoiled(72, 5), Err(BadFrame::Frame(5)));
        assert_eq!(spoiled(75, 1), Err(BadFrame::Reserved));
    }

    #[test]
    fn a_frame_beyond_its_message_or_without_bytes_does_not_fit() {
        let example = Header { body: 100, ..example() };
        assert!(example.fits());
        for (offset, length) in [(61, 40), (u64::MAX, 2), (100, 0), (0, 0), (0, 101)] {
            assert!(!Header { offset, length, ..example }.fits(), "{offset} and {length}");
        }
    }

    proptest! {
        #[test]
        fn every_header_survives_the_wire(
            codes in (0usize..Kind::ALL.len(), 0usize..DType::ALL.len(), 0usize..=ReduceOp::ALL.len()),
            words in any::<[u32; 4]>(),
            longs in any::<[u64; 6]>(),
            frame in 0usize..FrameKind::ALL.len(),
            root in proptest::option::of(0..u32::MAX),
            shape in any::<(u8, [u32; 4])>(),
            added in any::<(u32, u8, u8, u16)>(),
        ) {
            let fingerprint = Fingerprint {
                epoch: words[0],
                lane: words[1],
                kind: Kind::ALL[codes.0],
                seq: longs[0],
                dtype: DType::ALL[codes.1],
                op: ReduceOp::ALL.get(codes.2).copied(),
                root,
                count: longs[1],
                shape: Shape { ndim: shape.0, dims: shape.1 },
                tag: added.0,
                codec: added.1,
                device: added.2,
                flags: added.3,
                step: words[3],
            };
            let [.., body, message, offset, length] = longs;
            let header =
                Header { fingerprint, part: words[2], body, frame: FrameKind::ALL[frame], message, offset, length };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn random_bytes_are_refused_or_are_exactly_a_header(
            bytes in proptest::collection::vec(any::<u8>(), LEN),
            with_magic in any::<bool>(),
            with_reserved in any::<bool>(),
        ) {
            let mut bytes: [u8; LEN] = bytes.try_into().expect("as many as a header has");
            if !with_reserved {
                bytes[72] %= 8;
                bytes[73..76].fill(0);
            }
            if with_magic {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
            }
            match Header::decode(&bytes) {
                Ok(header) => prop_assert_eq!(header.encode(), bytes),
                Err(BadFrame::Magic(found)) => prop_assert_ne!(found, MAGIC),
                Err(_) => prop_assert!(with_magic),
            }
        }
    }
}
