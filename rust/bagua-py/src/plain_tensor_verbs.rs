//! Verbs on plain torch tensors, in a single call from Python.
//!
//! If tensors are not plain, differ in type or have sizes that do not fit, the call does nothing and says so. Python
//! then calls the verb by address, which raises the error or makes the necessary copy. Every check therefore exists
//! once, and the core's own checks are enough here. A small blocking all_reduce takes 0.8 us from Python through this
//! call, and 1.3 us by address.

#![allow(unsafe_code)]

use bagua_core::group::Options;
use bagua_core::request::Verb;
use bagua_core::types::{DType, Kind, ReduceOp, Shape};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::address_to_region::{self, Operands};
use crate::gil::Failure;
use crate::group::Communicator;
use crate::handle::Handle;
use crate::tensor_reader::{self, TensorReader};
use crate::verb_arguments::{Call, CommunicationThread, Request};

/// A verb on plain tensors.
pub struct Plain {
    verb: Verb<'static>,
    dtype: DType,
    shape: Option<Shape>,
    operands: Operands,
    /// True if this rank's tensor does not change.
    reads_only: bool,
}

impl Communicator {
    /// Implements `Communicator.try_run` for a verb that writes to `dst`.
    pub fn run_plain(&self, plain: Plain, reader: &TensorReader, dst: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Plain { verb, dtype, shape, mut operands, reads_only } = plain;
        let options = Options { shape, ..Options::DEFAULT };
        let bytes = operands.bytes();
        let outcome = self.here(dst.py(), bytes, |lane| lane.run(&options, dtype, verb, operands.io()));
        match outcome {
            Err(Failure::Failed(error)) if error.is_argument() => Ok(false),
            outcome => {
                // The change is reported even after a failure, because half of the tensor may have been written.
                if !reads_only {
                    reader.changed(dst)?;
                }
                outcome.map(|()| true).map_err(|failure| failure.raise(dst.py(), self.origin()))
            }
        }
    }

    /// Implements `Communicator.try_begin` for a verb from `src`, which may be None, to `dst`.
    pub fn begin_plain(
        &self,
        plain: Plain,
        reader: &TensorReader,
        src: Option<&Bound<'_, PyAny>>,
        dst: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Handle>> {
        let Plain { verb, dtype, shape, operands, reads_only } = plain;
        let Ok(mut request) = Request::of(self.group(), verb, dtype, operands) else { return Ok(None) };
        if !reads_only {
            reader.changed(dst)?;
        }
        let py = dst.py();
        // Tensors that share the memory keep it if the caller gives `src` or `dst` other memory (`dst.data = ...`).
        let data = |x: &Bound<'_, PyAny>| x.getattr(intern!(py, "data")).map(Bound::unbind);
        let keep = (src.map(data).transpose()?, data(dst)?).into_pyobject(py)?.into_any().unbind();
        let call = Call { shape, timeout: None, async_op: true, keep: Some(keep) };
        let (bytes, op) = (request.bytes(), request.announced());
        self.go(py, call, None, bytes, &op, move |lane, options| request.run(lane, options))
    }

    /// Returns the verb, if its operation and root are valid and the tensors are plain, of one type and do not overlap.
    #[inline]
    pub fn plain(
        &self,
        kind: u8,
        reader: &TensorReader,
        src: Option<&Bound<'_, PyAny>>,
        dst: &Bound<'_, PyAny>,
        op: &Bound<'_, PyAny>,
        root: &Bound<'_, PyAny>,
    ) -> Option<Plain> {
        // Accept only an int. torch.distributed's ReduceOp converts to an int too, but has other numbers.
        if !op.is_instance_of::<PyInt>() {
            return None;
        }
        let (op, root) = (ReduceOp::from_code(op.extract().ok()?)?, root.extract::<usize>().ok()?);
        let kind = Kind::from_code(kind)?;
        let verb = Verb::of(kind, op, root).ok()?;
        let to = reader.read(dst, tensor_reader::shape)?;
        let from = match src {
            None => None,
            Some(src) => Some(reader.read(src, tensor_reader::shape)?),
        };
        let dtype = to.dtype;
        if from.as_ref().is_some_and(|from| from.dtype != dtype) {
            return None;
        }
        let shape = reader.compares_shapes.then(|| from.as_ref().map_or(to.shape, |from| from.shape));
        // SAFETY: the addresses were just read from tensors, which hold their memory. The caller holds it until a
        // blocking verb has returned or an asynchronous one is done.
        let region = |plain: &tensor_reader::Plain<_>| unsafe {
            address_to_region::region_at(plain.address, plain.count, dtype)
        };
        let source = from.as_ref().map(region).transpose().ok()?;
        let operands = Operands::new(source, region(&to).ok()?).ok()?;
        let reads_only = kind == Kind::Broadcast && self.group().rank() == root;
        Some(Plain { verb, dtype, shape, operands, reads_only })
    }
}
