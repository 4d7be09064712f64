//! Reductions of arrays of a device by our kernels, with the host's bits.

use std::sync::atomic::Ordering;

use bagua_core::error::Result;
use bagua_core::types::{DType, ReduceOp};

use crate::context::Context;
use crate::driver_functions::CUstream;
use crate::kernels::{Grid, MAX_SOURCES, Reduce};
use crate::lane_state::LaneDevice;
use crate::loaded_kernels::Kernel;

/// How elements of one type are reduced by one operation on one device.
pub(crate) struct Reduction {
    kernel: Kernel,
    /// Multiprocessors of the device.
    processors: u32,
    /// Bytes of what the kernel counts as an element.
    unit: usize,
    /// What averages divide the sum by.
    divisor: f64,
}

impl Reduction {
    /// Loads the kernel; `avg` divides by `ranks`.
    ///
    /// # Errors
    /// `Unavailable` that names NVRTC where the kernel cannot be compiled; `UnsupportedType`; `Device`.
    pub(crate) fn new(context: &Context, dtype: DType, op: ReduceOp, ranks: usize) -> Result<Reduction> {
        op.check(dtype)?;
        let how = Reduce::new(dtype, op).expect("checked above");
        let kernel = context.kernel(&how.kernel)?;
        let (processors, unit) = (context.processors()?, dtype.size() / how.times);
        Ok(Reduction { kernel, processors, unit, divisor: ranks as f64 })
    }

    /// As many bytes at each source become as many at `to`, in the order of the sources. Counts the launch.
    ///
    /// # Panics
    /// For more than [`MAX_SOURCES`] sources, and for none.
    ///
    /// # Safety
    /// All are memory that the device can reach, of `bytes`, which lives until the stream has come so far. No other work uses the target
    /// until then, and none writes to a source. The target may be one of the sources.
    pub(crate) unsafe fn launch(
        &self,
        lane_device: &LaneDevice,
        stream: CUstream,
        sources: &[usize],
        to: usize,
        bytes: usize,
    ) -> Result<()> {
        let mut addresses = [sources[0] as u64; MAX_SOURCES];
        for (address, source) in addresses[..sources.len()].iter_mut().zip(sources) {
            *address = *source as u64;
        }
        let mut number = sources.len() as u64;
        let (mut out, mut count, mut divisor) = (to as u64, (bytes / self.unit) as u64, self.divisor.to_bits());
        let mut arguments = [
            addresses.as_mut_ptr().cast(),
            (&raw mut number).cast(),
            (&raw mut out).cast(),
            (&raw mut count).cast(),
            (&raw mut divisor).cast(),
        ];
        let grid = Grid::of_bytes(bytes as u64, self.processors);
        // SAFETY: the parameters of `reduce_T_OP`, and the caller's promise.
        unsafe { lane_device.context().launch_with(self.kernel, grid, stream, &mut arguments) }?;
        lane_device.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
