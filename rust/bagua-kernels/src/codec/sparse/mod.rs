//! top_k and random_k: some of the elements unchanged, with their places. All other elements decode to 0.
//!
//! A record has k places as ascending u32, k values in the element type, and zeros up to a multiple of 32. A decoder
//! rejects places that do not ascend or are out of range. The two codecs differ only in how they choose the places.

mod random;
mod random_k;
mod record;
mod top_k;

pub use random_k::RandomK;
pub use top_k::TopK;
