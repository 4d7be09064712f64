//! The arguments of a verb, as Python passes them, become one request for a lane.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use bagua_core::engine as core;
use bagua_core::error::{Error, Result};
use bagua_core::group::{Group, Lane, Options};
use bagua_core::memory::DeviceRef;
use bagua_core::recorder::{Announced, What};
use bagua_core::request::Verb;
use bagua_core::types::{DType, Kind, Shape};
use pyo3::prelude::*;

use crate::address_to_region::{self, Operands};
use crate::cuda_call::{self, CudaCall};
use crate::errors::{self, Origin, seconds};
use crate::handle::Handle;

/// Arguments of every operation in addition to its operands.
pub struct Call {
    pub shape: Option<Shape>,
    pub timeout: Option<Duration>,
    pub async_op: bool,
    /// Object that is kept until the operation is done.
    pub keep: Option<Py<PyAny>>,
}

impl Call {
    #[inline]
    pub fn new(
        shape: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_op: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Call> {
        let timeout = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        Ok(Call { shape: shape.as_deref().map(Shape::new), timeout, async_op, keep })
    }

    pub fn options(&self) -> Options<'static> {
        Options { timeout: self.timeout, shape: self.shape, ..Options::DEFAULT }
    }
}

/// A communication thread that runs verbs: a communicator's or an engine's.
pub trait CommunicationThread: Sync {
    /// Returns the group, for its errors.
    fn origin(&self) -> &Origin;

    /// Returns the worker of the core whose thread runs the verbs.
    fn worker(&self) -> &core::LaneWorker;

    /// Hands a verb to the lane, on memory of a device with `place`, and waits for the host's part unless the verb is
    /// asynchronous. The calling thread never waits for the device.
    fn submit(
        &self,
        py: Python<'_>,
        call: Call,
        place: Option<&CudaCall>,
        op: &Announced<'_>,
        verb: impl FnOnce(&mut Lane, &Options<'_>) -> Result<()> + Send + 'static,
    ) -> PyResult<Option<Handle>> {
        let options = call.options();
        let Call { async_op, keep, .. } = call;
        let device = place.map(|place| Arc::clone(place.core()));
        let on_device = device.clone();
        let job = move |lane: &mut Lane| {
            let prepared = on_device.as_ref().map_or(Ok(()), |device| device.lane_device().prepare());
            let outcome = prepared.and_then(|()| verb(lane, &options));
            match on_device {
                Some(device) => device.keep(Box::new(keep)),
                // This may run without the GIL. PyO3 then keeps the reference, and the next call from Python drops it.
                None => drop(keep),
            }
            outcome
        };
        if let Some(device) = &device {
            py.detach(|| device.start()).map_err(|e| self.origin().fail(py, e))?;
        }
        let core = py.detach(|| self.worker().submit_op(op, job)).map_err(|e| self.origin().raise(py, e))?;
        let mut handle = Handle::of(core, Some(self.origin().clone()));
        if let Some(device) = device {
            handle = handle.on_device(device);
        }
        cuda_call::finished(py, handle, async_op)
    }
}

/// Returns the description of queued messages for the flight recorder.
pub fn messages(kind: Kind, dtype: DType, count: usize) -> Announced<'static> {
    let bytes = count.saturating_mul(dtype.size());
    Announced { what: What::Kind(kind, None), dtype: Some(dtype), count, bytes, root: None, label: "" }
}

/// A verb with its operands.
pub struct Request {
    verb: Verb<'static>,
    dtype: DType,
    count: usize,
    operands: Operands,
}

/// Codes and addresses of a verb: kind, source, destination, elements, element type, reduce operation, root.
pub type Codes = (u8, Option<usize>, Option<usize>, usize, u8, u8, usize);

impl Request {
    /// Returns the request of these codes and addresses, for this rank of the group. `place` is their device.
    ///
    /// # Safety
    /// The promise of [`tensor`], as long as the request lives.
    #[inline]
    pub unsafe fn new(py: Python<'_>, group: &Group, codes: Codes, place: DeviceRef<'_>) -> PyResult<Request> {
        // SAFETY: by this function's promise.
        unsafe { Request::checked(group, codes, place) }.map_err(|e| errors::raise(py, e))
    }

    /// Returns the request for a verb of this rank of the group on these operands. Returns the errors of [`Lane::run`]
    /// for operands that do not fit the verb.
    pub fn of(group: &Group, verb: Verb<'static>, dtype: DType, mut operands: Operands) -> Result<Request> {
        let count = Lane::check(verb, dtype, &operands.io(), group.rank(), group.size())?;
        Ok(Request { verb, dtype, count, operands })
    }

    /// # Safety
    /// The conditions of [`Request::new`].
    #[inline]
    unsafe fn checked(
        group: &Group,
        (kind, src, dst, count, dtype, op, root): Codes,
        place: DeviceRef<'_>,
    ) -> Result<Request> {
        let kind = Kind::from_code(kind).ok_or_else(|| Error::InvalidArgument(format!("no verb has code {kind}")))?;
        let verb = Verb::of(kind, address_to_region::reduce_op(op)?, root)?;
        let dtype = address_to_region::dtype(dtype)?;
        let (src_parts, dst_parts) = verb.parts(group.rank(), group.size(), src.is_some());
        let dst = match (src, dst) {
            (_, Some(address)) => address,
            (Some(_), None) if dst_parts == 0 => 0,
            (Some(_), None) => {
                return Err(Error::InvalidArgument(format!("{} needs a destination on this rank", kind.name())));
            }
            (None, None) if matches!(verb, Verb::Barrier) => 0,
            (None, None) => {
                return Err(Error::InvalidArgument(format!("{} needs a source or a destination", kind.name())));
            }
        };
        // SAFETY: by this function's promise.
        let shards = |address, parts| unsafe { address_to_region::shards_in(place, address, count, parts, dtype) };
        let src = src.map(|address| shards(address, src_parts)).transpose()?;
        let operands = Operands::new(src, shards(dst, dst_parts)?)?;
        Ok(Request { verb, dtype, count, operands })
    }

    /// Returns the number of bytes of the larger buffer.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.operands.bytes()
    }

    /// Returns the description of the queued request for the flight recorder.
    pub fn announced(&self) -> Announced<'static> {
        Announced {
            what: What::Kind(self.verb.kind(), self.verb.op()),
            dtype: (!matches!(self.verb, Verb::Barrier)).then_some(self.dtype),
            count: self.count,
            bytes: self.bytes(),
            root: self.verb.root(),
            label: "",
        }
    }

    /// Runs the request.
    #[inline]
    pub fn run(&mut self, lane: &mut Lane, options: &Options<'_>) -> Result<()> {
        lane.run(options, self.dtype, self.verb, self.operands.io())
    }
}
