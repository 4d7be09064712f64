//! Averages of arrays on a device by our kernels, with the host's bits.

use std::sync::atomic::Ordering;

use bagua_core::error::Result;
use bagua_core::types::{DType, ReduceOp};

use crate::context::Context;
use crate::device_lane::LaneDevice;
use crate::driver_functions::CUstream;
use crate::kernels::{Grid, MAX_SOURCES, average_of};
use crate::loaded_kernels::Kernel;

/// The kernel for one element type on one device.
pub(crate) struct Average {
    kernel: Kernel,
    processors: u32,
    /// Size in bytes of the kernel's elements.
    unit: usize,
    /// The sum is divided by this number.
    divisor: f64,
}

impl Average {
    /// Loads the kernel. Fails with `Unavailable` if the kernel cannot be compiled, `UnsupportedType`, or `Device`.
    pub(crate) fn new(context: &Context, dtype: DType, divisor: usize) -> Result<Average> {
        ReduceOp::Avg.check(dtype)?;
        let (kernel, unit) = average_of(dtype);
        let (kernel, processors) = (context.kernel(kernel)?, context.processors()?);
        Ok(Average { kernel, processors, unit, divisor: divisor as f64 })
    }

    /// Averages the sources, of `bytes` bytes each, to `to`, in the order of the sources. Counts the launch.
    ///
    /// # Panics
    /// If there are no sources, or more than [`MAX_SOURCES`].
    ///
    /// # Safety
    /// All addresses must be memory that the device can reach. Until the work on the stream is done, it must stay
    /// allocated, and nothing else may use the target or write to a source. The target may be a source.
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
        // SAFETY: the parameters of `average_T`, and guaranteed by the caller.
        unsafe { lane_device.context().launch_with(self.kernel, grid, stream, &mut arguments) }?;
        lane_device.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
