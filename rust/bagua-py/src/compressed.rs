//! `CompressedExchange`: compressed collectives whose records another communication library sends.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bagua_core::codec::{self, chunks};
use bagua_core::collective::{OpContext, RecordExchange, compressed_all_reduce, compressed_reduce_scatter};
use bagua_core::error::{Error, Result};
use bagua_core::health::GroupHealth;
use bagua_core::memory::{Buffer, BufferMut};
use bagua_core::request::{Compression, Extra, Workspace};
use bagua_core::stats::OpStats;
use bagua_core::types::{DType, Fingerprint, Kind};
use bagua_core::wait::{Deadline, lock};
use pyo3::prelude::*;

use crate::address_to_region;
use crate::codec::Codec;
use crate::errors;
use crate::user_callback::call_user;

/// An exchange that combines tensors in host memory over the `size` members of a group, through a codec. `rank` is this
/// process's rank in the group.
///
/// Two functions send the records. A record is `record` bytes of host memory, and there is one for each member.
/// `all_to_all(sent, received, record)` sends block j of `sent` to member j, and stores the block from member i at
/// place i of `received`. `all_gather(blocks, record)` starts with block `rank` of `blocks`, and fills in the block of
/// each other member. Both functions return when the exchange is done. The methods pass on the exceptions that they
/// raise.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct CompressedExchange {
    codec: Arc<dyn codec::Codec>,
    rank: usize,
    size: usize,
    all_to_all: Py<PyAny>,
    all_gather: Py<PyAny>,
    /// Memory kept between calls. A call that runs at the same time on another thread finds an empty one.
    memory: Mutex<Workspace>,
}

#[pymethods]
impl CompressedExchange {
    #[new]
    fn new(codec: &Codec, rank: usize, size: usize, all_to_all: Py<PyAny>, all_gather: Py<PyAny>) -> Self {
        CompressedExchange { codec: codec.core(), rank, size, all_to_all, all_gather, memory: Mutex::default() }
    }

    /// Replaces the `count` elements of type `dtype` at `address` by their mean over the members. `call` is the number
    /// of the call, equal on all members: codecs with randomness use it as a seed. `error` is None or the address of
    /// the error memory, which has `count` float32. The caller promises that both addresses stay valid, and that no
    /// other code uses them, until the call has returned.
    ///
    /// Raises TypeError for a type that cannot be encoded, ValueError if an option of the codec does not fit the count.
    #[pyo3(signature = (address, count, dtype, *, call, error))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: u8,
        call: u64,
        error: Option<usize>,
    ) -> PyResult<()> {
        self.run(py, address, count, dtype, self.size, call, error, |functions, cx, data, how| {
            compressed_all_reduce(functions, cx, data, how)
        })
    }

    /// Combines the `count` elements of type `dtype` at `address`, which consist of one part for each member, and
    /// stores this member's part of the result at `result`: the mean over the members if `average`, otherwise the sum.
    /// Each part is encoded once. The elements at `address` are overwritten. `call` and `error` are those of
    /// `all_reduce`. The caller promises that the three addresses stay valid, that their memory does not overlap, and
    /// that no other code uses it, until the call has returned.
    ///
    /// Raises TypeError for a type that cannot be encoded, ValueError if the count is not a multiple of the number of
    /// members, or if an option of the codec does not fit the count.
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's, and most arguments are keywords there")]
    #[pyo3(signature = (address, result, count, dtype, *, average, call, error))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        address: usize,
        result: usize,
        count: usize,
        dtype: u8,
        average: bool,
        call: u64,
        error: Option<usize>,
    ) -> PyResult<()> {
        let divisor = if average { self.size } else { 1 };
        self.run(py, address, count, dtype, divisor, call, error, |functions, cx, data, how| {
            // SAFETY: the caller's promise.
            let mut result = unsafe { address_to_region::region_at(result, count / self.size, cx.dtype()) }?;
            compressed_reduce_scatter(functions, cx, data.into_host()?, result.buffer_mut().into_host()?, how)
        })
    }
}

impl CompressedExchange {
    #[expect(clippy::too_many_arguments, reason = "those of the calls from Python")]
    fn run<C>(
        &self,
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: u8,
        divisor: usize,
        call: u64,
        error: Option<usize>,
        collective: C,
    ) -> PyResult<()>
    where
        C: FnOnce(&mut Functions<'_>, &OpContext<'_>, BufferMut<'_>, &Compression<'_>) -> Result<()> + Send,
    {
        let mut raised = None;
        let outcome = py.detach(|| {
            let dtype = address_to_region::dtype(dtype)?;
            self.codec.check(dtype)?;
            // SAFETY: the caller's promise, see `all_reduce` and `reduce_scatter`.
            let mut data = unsafe { address_to_region::region_at(address, count, dtype) }?;
            // SAFETY: as above.
            let mut error =
                error.map(|error| unsafe { address_to_region::region_at(error, count, DType::F32) }).transpose()?;
            let mut work = std::mem::take(&mut *lock(&self.memory));
            let extra =
                Extra { error: error.as_mut().map(|e| e.buffer_mut()), work: Some(&mut work), ..Extra::default() };
            let cx = OpContext {
                fingerprint: Fingerprint::new(Kind::CompressedAllReduce, dtype, count),
                // The Python functions `all_to_all` and `all_gather` have deadlines of their own.
                deadline: Deadline::after(Duration::MAX),
                health: &GroupHealth::local(self.rank, self.size),
                stats: &OpStats::default(),
                label: "",
                extra: &RefCell::new(extra),
            };
            let how =
                Compression { codec: &*self.codec, divisor, draw: chunks::draw(call, 0), elements: count, exact: 0 };
            let mut functions = Functions { exchange: self, raised: &mut raised };
            let outcome = collective(&mut functions, &cx, data.buffer_mut(), &how);
            *lock(&self.memory) = work;
            outcome
        });
        match raised {
            Some(raised) => Err(raised),
            None => outcome.map_err(|e| errors::raise(py, e)),
        }
    }
}

/// An exchange of records by the Python functions `all_to_all` and `all_gather`.
struct Functions<'a> {
    exchange: &'a CompressedExchange,
    /// The exception that one of the Python functions raised.
    raised: &'a mut Option<PyErr>,
}

impl Functions<'_> {
    fn call(&mut self, function: &Py<PyAny>, arguments: &[usize]) -> Result<()> {
        let result = Python::attach(|py| {
            let arguments = pyo3::types::PyTuple::new(py, arguments)?;
            call_user(function.bind(py), &arguments)
        });
        result.map_err(|raised| {
            let text = raised.to_string();
            *self.raised = Some(raised);
            Error::InvalidArgument(text)
        })
    }
}

impl RecordExchange for Functions<'_> {
    fn rank(&self) -> usize {
        self.exchange.rank
    }

    fn size(&self) -> usize {
        self.exchange.size
    }

    fn all_to_all(
        &mut self,
        _cx: &OpContext<'_>,
        sent: Buffer<'_>,
        received: BufferMut<'_>,
        record: usize,
    ) -> Result<()> {
        self.call(&self.exchange.all_to_all, &[sent.address(), received.as_buffer().address(), record])
    }

    fn all_gather(&mut self, _cx: &OpContext<'_>, records: BufferMut<'_>, record: usize) -> Result<()> {
        self.call(&self.exchange.all_gather, &[records.as_buffer().address(), record])
    }
}
