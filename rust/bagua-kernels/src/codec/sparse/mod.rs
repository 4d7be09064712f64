//! top_k and random_k: some of the elements as they are, with their places; the others come back as 0.
//!
//! A record is k places as ascending u32, k values in the element type, zeros up to a multiple of 32. Both codecs differ only in how an
//! encoder chooses the places. A decoder refuses places that do not ascend or that no element has.

mod random;
mod random_k;
mod record;
mod top_k;

pub use random_k::RandomK;
pub use top_k::TopK;
