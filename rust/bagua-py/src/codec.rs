//! `Codec`: encoding elements into fewer bytes and back.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bagua_core::codec::{self, CodecOption, Scratch, chunks};
use bagua_core::error::{Error, Result};
use bagua_core::types::DType;
use bagua_core::wait::lock;
use bagua_cuda::codec::{self as on_device, Elements, Records};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::address_to_region;
use crate::cuda_call::CudaCall;
use crate::errors;

/// A codec with its options, for callers that pass addresses. Users have `bagua.Codec`. The caller promises that the
/// addresses stay valid, and that no other code writes to a source or uses a destination, until the call has returned,
/// or on a device until the work is done.
///
/// Raises ValueError for an unknown name or an option out of its range, TypeError for an unknown option or one of the
/// wrong type.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Codec {
    core: Arc<dyn codec::Codec>,
    /// Number of calls of `encode`, for codecs that draw at random.
    calls: AtomicU64,
    /// Scratch memory of the encoder. A second thread that encodes at the same time gets empty memory.
    scratch: Mutex<Scratch>,
}

impl Codec {
    /// Returns the core's codec.
    pub fn core(&self) -> Arc<dyn codec::Codec> {
        self.core.clone()
    }
}

/// Returns an option's value: an integer if Python can convert it to one, and otherwise a float.
fn option(name: &str, value: &Bound<'_, PyAny>) -> PyResult<CodecOption> {
    match value.extract::<i64>() {
        Ok(value) => return Ok(CodecOption::Int(value)),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            return Err(PyValueError::new_err(format!("option {name} does not fit 64 bits")));
        }
        Err(_) => {}
    }
    let number = value.extract::<f64>().map_err(|_| {
        let kind = value.get_type().name().map_or_else(|_| "?".to_owned(), |kind| kind.to_string());
        PyTypeError::new_err(format!("option {name} is a {kind}; it must be a number"))
    })?;
    Ok(CodecOption::Float(number))
}

/// Returns the element type, and the division of `count` elements into equal parts, from Python's integers.
fn sizes(count: i64, dtype: u8, chunks: i64) -> Result<(usize, DType, usize)> {
    let refused = || Error::InvalidArgument(format!("{count} elements cannot be cut into {chunks} equal chunks"));
    let parsed = usize::try_from(count).ok().zip(usize::try_from(chunks).ok());
    let (count, chunks) = parsed.ok_or_else(refused)?;
    Ok((count, address_to_region::dtype(dtype)?, chunks))
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "the signatures are Python's")]
impl Codec {
    #[new]
    fn new(py: Python<'_>, name: &str, options: &Bound<'_, PyDict>) -> PyResult<Codec> {
        let mut given = Vec::with_capacity(options.len());
        for (name, value) in options {
            let name: String = name.extract()?;
            let value = option(&name, &value)?;
            given.push((name, value));
        }
        let core = codec::by_name(name, &given).map_err(|e| errors::raise(py, e))?;
        Ok(Codec { core, calls: AtomicU64::new(0), scratch: Mutex::default() })
    }

    /// Registered name of the codec.
    #[getter]
    fn name(&self) -> &'static str {
        self.core.name()
    }

    /// All options of the codec with their values.
    #[getter]
    fn options<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let options = PyDict::new(py);
        for (name, value) in self.core.values() {
            match value {
                CodecOption::Int(value) => options.set_item(name, value)?,
                CodecOption::Float(value) => options.set_item(name, value)?,
            }
        }
        Ok(options)
    }

    /// Returns the number of bytes that `count` elements take when they are encoded in `chunks` equal parts.
    ///
    /// Raises ValueError if `chunks` does not divide `count` or an option does not fit, TypeError for a type that
    /// cannot be encoded.
    fn encoded_bytes(&self, py: Python<'_>, count: i64, dtype: u8, chunks: i64) -> PyResult<usize> {
        sizes(count, dtype, chunks)
            .and_then(|(count, dtype, chunks)| chunks::records_len(&*self.core, dtype, count, chunks))
            .map_err(|e| errors::raise(py, e))
    }

    /// Encodes `count` elements at `src`, in `chunks` equal parts, into the `len` bytes at `dst`.
    ///
    /// With `call`, both addresses are on its device: the call's stream does the work, and `keep` is held until the
    /// device is done.
    ///
    /// Raises the errors of `encoded_bytes`, and ValueError if `len` differs from `encoded_bytes` or if the memory
    /// overlaps. On a device, also raises the errors of `check_device`, BaguaError without NVRTC, and DeviceError.
    #[pyo3(signature = (src, count, dtype, chunks, dst, len, *, call=None, keep=None))]
    fn encode(
        &self,
        py: Python<'_>,
        src: usize,
        count: i64,
        dtype: u8,
        chunks: i64,
        dst: usize,
        len: usize,
        call: Option<&CudaCall>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        self.run(py, call, keep, || {
            let (count, dtype, chunks) = sizes(count, dtype, chunks)?;
            if let Some(call) = call {
                let (from, to) = (Elements { address: src, count, dtype }, Records { address: dst, len });
                // SAFETY: the caller's promise, see the class; `keep` holds both arrays until the device is done.
                return unsafe { on_device::encode(call.core(), &*self.core, from, chunks, to) };
            }
            // SAFETY: the caller of the method promises (see the class) that both addresses stay valid, and that no
            // other code uses `dst`, while this call lasts.
            let (src, dst) = unsafe {
                (address_to_region::region_at(src, count, dtype), address_to_region::region_at(dst, len, DType::U8))
            };
            let (src, mut dst) = (src?, dst?);
            address_to_region::check_apart(&src, &dst)?;
            let mut scratch = std::mem::take(&mut *lock(&self.scratch));
            let call = || self.calls.fetch_add(1, Ordering::Relaxed);
            let encoded =
                chunks::encode(&*self.core, dtype, src.as_host()?, chunks, dst.as_host_mut()?, call, &mut scratch);
            *lock(&self.scratch) = scratch;
            encoded.map(|_| ())
        })
    }

    /// Decodes the `len` bytes at `src` into `count` elements at `dst`, in `chunks` equal parts. `call` is that of
    /// `encode`.
    ///
    /// Raises the errors of `encode`, and ValueError for bytes that no encoder writes. A device does not check for such
    /// bytes.
    #[pyo3(signature = (src, len, dst, count, dtype, chunks, *, call=None, keep=None))]
    fn decode(
        &self,
        py: Python<'_>,
        src: usize,
        len: usize,
        dst: usize,
        count: i64,
        dtype: u8,
        chunks: i64,
        call: Option<&CudaCall>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        self.run(py, call, keep, || {
            let (count, dtype, chunks) = sizes(count, dtype, chunks)?;
            if let Some(call) = call {
                let (from, to) = (Records { address: src, len }, Elements { address: dst, count, dtype });
                // SAFETY: as in `encode`.
                return unsafe { on_device::decode(call.core(), &*self.core, from, to, chunks) };
            }
            // SAFETY: as in `encode`.
            let (src, dst) = unsafe {
                (address_to_region::region_at(src, len, DType::U8), address_to_region::region_at(dst, count, dtype))
            };
            let (src, mut dst) = (src?, dst?);
            address_to_region::check_apart(&src, &dst)?;
            chunks::decode(&*self.core, dtype, src.as_host()?, chunks, dst.as_host_mut()?)
        })
    }

    /// Raises NotImplementedError if the codec has no kernels for devices.
    fn check_device(&self, py: Python<'_>) -> PyResult<()> {
        on_device::check(&*self.core).map_err(|e| errors::raise(py, e))
    }
}

impl Codec {
    /// Runs work without the GIL. The device of `call` holds `keep` until the work is done.
    fn run(
        &self,
        py: Python<'_>,
        call: Option<&CudaCall>,
        keep: Option<Py<PyAny>>,
        work: impl FnOnce() -> Result<()> + Send,
    ) -> PyResult<()> {
        let outcome = py.detach(work);
        if let Some(call) = call {
            call.core().keep(Box::new(keep));
        }
        outcome.map_err(|e| errors::raise(py, e))
    }
}
