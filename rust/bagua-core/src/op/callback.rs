//! An operation that the caller wrote: a function of the bucket's name.

use super::{BucketCx, Op};
use crate::error::{Error, Result};

type Callback = Box<dyn Fn(&str) -> Result<()> + Send + Sync>;

/// Calls a function on the communication thread. What the function returns as an error reaches the next call of the engine and,
/// through the group, the other ranks.
pub struct CallbackOp {
    callback: Callback,
}

impl CallbackOp {
    /// An operation that calls `callback` with the bucket's name.
    pub fn new(callback: impl Fn(&str) -> Result<()> + Send + Sync + 'static) -> CallbackOp {
        CallbackOp { callback: Box::new(callback) }
    }
}

impl Op for CallbackOp {
    fn name(&self) -> &'static str {
        "callback"
    }

    fn run(&self, cx: &mut BucketCx<'_>) -> Result<()> {
        let bucket = cx.bucket;
        // What the function puts on the device's own stream comes after what was marked, and before the operations that follow.
        if let Some(device) = cx.device() {
            device.order(None)?;
        }
        let called = (self.callback)(bucket).map_err(|error| {
            let place = |text: String| format!("in the callback of bucket '{bucket}': {text}");
            match error {
                Error::InvalidArgument(text) => Error::InvalidArgument(place(text)),
                Error::UnsupportedType(text) => Error::UnsupportedType(place(text)),
                Error::NotImplemented(text) => Error::NotImplemented(place(text)),
                Error::System { message, source } => Error::System { message: place(message), source },
                // These say themselves where they come from: the callback ran a collective of its own.
                other @ (Error::PeerLost { .. }
                | Error::Timeout { .. }
                | Error::PeerRaised { .. }
                | Error::Mismatch(_)
                | Error::Unavailable(_)
                | Error::Device(_)
                | Error::Aborted(_)) => other,
            }
        });
        called.and_then(|()| cx.device().map_or(Ok(()), |device| device.mark(None)))
    }
}
