//! The header of everything that travels between two messengers: 32 bytes, little-endian.
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0 | kind | code of [`FrameKind`] |
//! | 1 | dtype | code of [`DType`] |
//! | 2..4 | reserved | 0 |
//! | 4..8 | tag | the message's |
//! | 8..16 | id | number that the sender gave the message |
//! | 16..24 | total | bytes of the message |
//! | 24..32 | body | bytes of the message that follow this header |

use crate::types::DType;

/// Bytes of a header.
pub(super) const LEN: usize = 32;

/// What follows a header, and what the other end does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// The sender has a message; its bytes come after [`FrameKind::Ready`].
    Offer = 1,
    /// The sender has a message, and its bytes follow.
    Eager = 2,
    /// The receiver has a place for an offered message, or has taken an eager one.
    Ready = 3,
    /// The next bytes of an offered message follow.
    Data = 4,
    /// The sender sends no more messages.
    End = 5,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: FrameKind,
    pub(super) dtype: DType,
    pub(super) tag: u32,
    pub(super) id: u64,
    pub(super) total: u64,
    pub(super) body: u64,
}

impl Frame {
    /// The bytes that travel.
    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[0] = self.kind as u8;
        out[1] = self.dtype as u8;
        out[4..8].copy_from_slice(&self.tag.to_le_bytes());
        out[8..16].copy_from_slice(&self.id.to_le_bytes());
        out[16..24].copy_from_slice(&self.total.to_le_bytes());
        out[24..32].copy_from_slice(&self.body.to_le_bytes());
        out
    }

    /// Reads what [`Frame::encode`] wrote; `None` for bytes that it cannot have written.
    pub(super) fn decode(bytes: &[u8; LEN]) -> Option<Frame> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let kind = match bytes[0] {
            1 => FrameKind::Offer,
            2 => FrameKind::Eager,
            3 => FrameKind::Ready,
            4 => FrameKind::Data,
            5 => FrameKind::End,
            _ => return None,
        };
        let frame = Frame {
            kind,
            dtype: DType::from_code(bytes[1])?,
            tag: u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])),
            id: word(8),
            total: word(16),
            body: word(24),
        };
        let has_body = matches!(kind, FrameKind::Eager | FrameKind::Data);
        let fits = frame.body <= frame.total && (has_body || frame.body == 0);
        (bytes[2..4] == [0, 0] && fits).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_golden_bytes_of_a_header_never_change() {
        let frame = Frame { kind: FrameKind::Data, dtype: DType::F32, tag: 7, id: 8, total: 1000, body: 300 };
        let mut golden = [0; LEN];
        (golden[0], golden[1], golden[4], golden[8]) = (4, DType::F32 as u8, 7, 8);
        (golden[16], golden[17], golden[24], golden[25]) = (0xe8, 3, 44, 1);
        assert_eq!(frame.encode(), golden);
        assert_eq!(Frame::decode(&golden), Some(frame));
    }

    proptest! {
        #[test]
        fn random_bytes_are_refused_or_are_exactly_a_header(mut bytes in any::<[u8; LEN]>(), small in any::<bool>()) {
            if small {
                bytes[0] %= 6;
                bytes[1] %= 16;
                bytes[2..4].fill(0);
                bytes[24..].fill(0);
            }
            if let Some(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
                prop_assert!(frame.body <= frame.total);
            }
        }
    }
}
