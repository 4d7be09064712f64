//! Changes of an input: bits, numbers at their limits, lengths, and pieces that are cut out, doubled, or taken from
//! another input.

/// A sequence of choices that a seed determines: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", OOPSLA 2014.
pub(super) struct Choices(u64);

impl Choices {
    /// Returns the choices for input number `index` of a run, so that each input can be made again alone.
    pub(super) fn new(seed: u64, index: u64) -> Choices {
        let mut seeded = Choices(seed);
        Choices(seeded.next() ^ index.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`, which must not be 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 16) as usize % limit
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// Returns a number at a limit of an integer type or of a format, or next to one.
    fn boundary(&mut self, rest: usize) -> u64 {
        const LIMITS: [u64; 16] = [
            0,
            0x7f,
            0xff,
            0x7fff,
            0xffff,
            2048,
            4096,
            12 << 10,
            16 << 10,
            64 << 10,
            8 << 20,
            64 << 20,
            1 << 31,
            u32::MAX as u64,
            i64::MAX as u64,
            u64::MAX,
        ];
        let limit = if self.one_in(3) { rest as u64 } else { LIMITS[self.below(LIMITS.len())] };
        limit.wrapping_add(self.below(3) as u64).wrapping_sub(1)
    }
}

/// Maximum length of an input, longer than the longest frame of the control plane.
const LONGEST: usize = 80 << 10;

/// Changes `input` one to four times. `other` is an input to take pieces from.
pub(super) fn mutate(input: &mut Vec<u8>, other: &[u8], choices: &mut Choices) {
    for _ in 0..=choices.below(4) {
        change(input, other, choices);
    }
    input.truncate(LONGEST);
}

fn change(input: &mut Vec<u8>, other: &[u8], choices: &mut Choices) {
    let len = input.len();
    if len == 0 {
        return input.extend_from_slice(other);
    }
    let at = choices.below(len);
    match choices.below(12) {
        0 => input[at] ^= 1 << choices.below(8),
        1 => input[at] = choices.next() as u8,
        2 => input.truncate(at),
        3 => {
            let new: Vec<u8> = (0..=choices.below(16)).map(|_| choices.next() as u8).collect();
            input.splice(at..at, new);
        }
        4 => _ = input.drain(at..len.min(at + 1 + choices.below(16))),
        5 => {
            let piece = input[at..len.min(at + 1 + choices.below(64))].to_vec();
            input.splice(at..at, piece);
        }
        6 if !other.is_empty() => {
            input.truncate(at);
            input.extend_from_slice(&other[choices.below(other.len())..]);
        }
        7 if !other.is_empty() => {
            let from = choices.below(other.len());
            let piece = &other[from..other.len().min(from + 1 + choices.below(32))];
            let end = len.min(at + piece.len());
            input.splice(at..end, piece.iter().copied());
        }
        8 => overwrite(input, at, &(choices.boundary(len - at) as u16).to_le_bytes()),
        9 => overwrite(input, at, &(choices.boundary(len - at) as u32).to_le_bytes()),
        10 => overwrite(input, at, &choices.boundary(len - at).to_le_bytes()),
        _ => resize_field(input, at, choices),
    }
}

fn overwrite(input: &mut [u8], at: usize, value: &[u8]) {
    let end = input.len().min(at + value.len());
    input[at..end].copy_from_slice(&value[..end - at]);
}

/// Searches from `at` on for a field that starts with its length, and makes the field shorter or longer. The new length
/// is right or wrong. A frame's length is a u32. The length of a text or list has 7 bits in each byte.
fn resize_field(input: &mut Vec<u8>, at: usize, choices: &mut Choices) {
    let is_frame = choices.one_in(3);
    let width = if is_frame { 4 } else { 1 };
    let length_at = |at: &usize| {
        let (len, rest) = input[*at..].split_at_checked(width)?;
        let len = if is_frame { u32::from_le_bytes(len.try_into().ok()?) } else { len[0].into() } as usize;
        (len > 0 && len <= rest.len() && (is_frame || len < 0x80)).then_some(len)
    };
    let Some((at, len)) = (at..input.len()).find_map(|at| Some((at, length_at(&at)?))) else { return };
    // Long inputs are slow.
    let most = if choices.one_in(256) { 20 << 10 } else { 2 * len + 8 };
    let new: Vec<u8> = input[at + width..at + width + len].iter().copied().cycle().take(choices.below(most)).collect();
    let mut said = if choices.one_in(4) { choices.boundary(new.len()) } else { new.len() as u64 };
    let mut length = Vec::new();
    if is_frame {
        length.extend_from_slice(&(said as u32).to_le_bytes());
    } else {
        while said >= 0x80 {
            length.push(said as u8 | 0x80);
            said >>= 7;
        }
        length.push(said as u8);
    }
    input.splice(at..at + width + len, length.into_iter().chain(new));
}
