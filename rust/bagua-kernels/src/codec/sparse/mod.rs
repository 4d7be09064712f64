//! top_k and random_k: some of the elements unchanged, with their places. All other elements decode to 0.
//!
//! A record has k places as ascending u32, k values in the element type, and zeros up to a multiple of 32. A decoder
//! rejects places that do not ascend or are out of range. The two codecs differ only in how they choose the places.
//! [`chunked`] has another record.

mod chunked;
mod random;
mod random_k;
mod record;
mod top_k;

use std::sync::Arc;

pub use chunked::ChunkedTopK;
pub use random_k::RandomK;
pub use top_k::TopK;

use super::{Codec, Options};
use crate::error::Result;

/// Returns top_k, with chunks if one of their options was set.
pub(super) fn top_k(options: &mut Options<'_>) -> Result<Arc<dyn Codec>> {
    if options.has("chunk") || options.has("bits") {
        return Ok(Arc::new(ChunkedTopK::new(options)?));
    }
    Ok(Arc::new(TopK::new(options)?))
}
