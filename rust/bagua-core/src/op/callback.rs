//! An operation that calls a function of the user.

use super::{BucketCx, Op};
use crate::error::{Error, Result};

type Callback = Box<dyn Fn(&str) -> Result<()> + Send + Sync>;

/// Calls a function with the bucket's name on the communication thread. An error of the function is returned by the
/// next call of the engine and, through the group, reaches the other ranks.
pub struct CallbackOp {
    callback: Callback,
}

impl CallbackOp {
    /// Creates an operation that calls `callback` with the bucket's name.
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
        // Work that the function queues on the device's own stream comes after the marked work, and before the
        // operations that follow.
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
                // These errors come from a collective that the callback ran. Their texts already name that operation.
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
