//! A verb on torch's tensors in one call from Python, where there is nothing to explain.
//!
//! Not plain, of two types, of sizes that do not fit: the answer is only that nothing was done. Python then goes the long way, by
//! address, whose checks say what is wrong, or make the copy that is needed. So every check has one home, and the core's own are
//! enough here. A small blocking all_reduce costs 0.8 us from Python this way, and 1.3 us by address.

#![allow(unsafe_code)]

use bagua_core::request::Verb;
use bagua_core::types::{Kind, ReduceOp};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::group::Communicator;
use crate::handle::Outcome;
use crate::interrupt;
use crate::request::{Call, Request};
use crate::tensor::{self, Operands};
use crate::tensor_reader::{self, TensorReader};

const REFUSED: Outcome = Outcome::Refused(false);

impl Communicator {
    /// See `try_run` there.
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
    pub fn run_on_plain_tensors(
        &self,
        kind: u8,
        reader: &TensorReader,
        src: Option<&Bound<'_, PyAny>>,
        dst: &Bound<'_, PyAny>,
        op: &Bound<'_, PyAny>,
        root: &Bound<'_, PyAny>,
        async_op: bool,
    ) -> PyResult<Outcome> {
        // Not what merely has an index: torch.distributed's ReduceOp does, and means something else by its numbers.
        if !op.is_instance_of::<PyInt>() {
            return Ok(REFUSED);
        }
        let (Ok(op), Ok(root)) = (op.extract::<u8>(), root.extract::<usize>()) else { return Ok(REFUSED) };
        let (Some(kind), Some(op)) = (Kind::from_code(kind), ReduceOp::from_code(op)) else { return Ok(REFUSED) };
        let Ok(verb) = Verb::of(kind, op, root) else { return Ok(REFUSED) };
        let Some(to) = reader.read(dst, tensor_reader::shape) else { return Ok(REFUSED) };
        let from = match src.map(|src| reader.read(src, tensor_reader::shape)) {
            Some(None) => return Ok(REFUSED),
            Some(Some(from)) if from.dtype != to.dtype => return Ok(REFUSED),
            from => from.flatten(),
        };
        let dtype = to.dtype;
        let shape = Some(from.as_ref().map_or(to.shape, |from| from.shape));
        let operands = || {
            // SAFETY: just read from tensors that the caller holds, and which hold their memory, until this call returns; an asynchronous
            // verb keeps them until it is done.
            let region =
                |plain: &tensor_reader::Plain<_>| unsafe { tensor::region_at(plain.address, plain.count, dtype) };
            Operands::new(from.as_ref().map(region).transpose()?, region(&to)?)
        };
        let Ok(operands) = operands() else { return Ok(REFUSED) };
        let (py, reads_only) = (dst.py(), kind == Kind::Broadcast && self.group().rank() == root);
        let mut call = Call { shape, timeout: None, async_op, keep: None };
        if async_op {
            let Ok(mut request) = Request::of(self.group(), verb, dtype, operands) else { return Ok(REFUSED) };
            if !reads_only {
                reader.changed(dst)?;
            }
            call.keep = Some((src, dst).into_pyobject(py)?.into_any().unbind());
            let (bytes, op) = (request.bytes(), request.announced());
            return self.go(py, call, bytes, &op, move |lane, options| request.run(lane, options)).map(Outcome::Begun);
        }
        let (options, mut operands) = (call.options(), operands);
        let bytes = operands.bytes();
        let outcome = self.here(py, bytes, |lane| lane.run(&options, dtype, verb, operands.io()));
        match outcome {
            Err(error) if error.is_argument() => return Ok(REFUSED),
            // Also after a failure, which may have come when half of it was written.
            outcome if !reads_only => {
                reader.changed(dst)?;
                interrupt::py_result(py, self.origin(), outcome)?;
            }
            outcome => interrupt::py_result(py, self.origin(), outcome)?,
        }
        Ok(Outcome::Begun(None))
    }
}
