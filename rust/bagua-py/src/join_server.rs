//! `JoinServer`: the server by which processes join a running elastic job.

#![allow(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;

use bagua_core::average as core;
use bagua_core::error::Error;
use bagua_core::group;
use bagua_core::wait::Deadline;
use bagua_cuda::LaneDevice;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::average::{self, Averager, WeightLock, settings};
use crate::codec::Codec;
use crate::config::GroupConfig;
use crate::cuda_call::CudaDevice;
use crate::errors::{self, seconds};
use crate::gil::DropWithoutGil;
use crate::interrupt;

/// The server of one rank of an elastic job. Accepts clients that know the secret and the token, and connects to the
/// servers of other ranks.
///
/// `config` is that of the groups that this process joins. `token` is a random number of the job. Addresses are
/// "host:port". Raises BaguaError if the socket cannot be opened.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct JoinServer {
    core: DropWithoutGil<Arc<group::JoinServer>>,
}

impl JoinServer {
    pub fn core(&self) -> Arc<group::JoinServer> {
        Arc::clone(&self.core)
    }
}

fn address(py: Python<'_>, text: &str) -> PyResult<SocketAddr> {
    text.parse()
        .map_err(|e| errors::raise(py, Error::InvalidArgument(format!("'{text}' is not the address of a server: {e}"))))
}

#[pymethods]
impl JoinServer {
    #[new]
    fn new(py: Python<'_>, config: &GroupConfig, token: Vec<u8>) -> PyResult<JoinServer> {
        let config = config.core();
        let core = py.detach(|| group::JoinServer::open(config, &token)).map_err(|e| errors::raise(py, e))?;
        Ok(JoinServer { core: DropWithoutGil::new(Arc::new(core)) })
    }

    /// Address at which the server listens.
    #[getter]
    fn address(&self) -> String {
        self.core.address().to_string()
    }

    /// Random number that identifies this process among all processes of its rank.
    #[getter]
    fn incarnation(&self) -> u64 {
        self.core.incarnation()
    }

    /// Number of connections that the server has refused.
    #[getter]
    fn refused(&self) -> u64 {
        self.core.refused()
    }

    /// Notes that this rank is in the job from now on.
    fn enter_job(&self) {
        self.core.enter_job();
    }

    /// Notes where the server of another rank listens.
    fn note_server(&self, py: Python<'_>, rank: usize, at: &str) -> PyResult<()> {
        self.core.note_server(rank, address(py, at)?);
        Ok(())
    }

    /// Requests the state of a rank: {"rank", "incarnation", "in_job", "models"}. Raises BaguaError if the rank's
    /// server refuses or does not answer within `timeout` seconds.
    fn status<'py>(&self, py: Python<'py>, rank: usize, at: &str, timeout: f64) -> PyResult<Bound<'py, PyDict>> {
        let (at, limit) = (address(py, at)?, seconds("timeout", timeout)?);
        let status = py.detach(|| self.core.status(rank, at, limit)).map_err(|e| errors::raise(py, e))?;
        let dict = PyDict::new(py);
        dict.set_item("rank", status.rank)?;
        dict.set_item("incarnation", status.incarnation)?;
        dict.set_item("in_job", status.in_job)?;
        dict.set_item("models", status.models)?;
        Ok(dict)
    }

    /// Joins the averaging of a model in the running job. Unlike `Communicator.averager`, only the joining rank calls
    /// it. This rank has the job's weights after `Averager.wait_joined`. The caller's promise about the addresses is
    /// that of `Communicator.averager`.
    ///
    /// Raises MismatchError for a model that does not fit, BaguaTimeoutError after `timeout` seconds.
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
    #[pyo3(signature = (name, weights, buffers, lock, interval, codec, digest, timeout, device=None))]
    fn join(
        &self,
        py: Python<'_>,
        name: &str,
        weights: Vec<average::Described>,
        buffers: Vec<average::Described>,
        lock: &WeightLock,
        interval: f64,
        codec: Option<&Codec>,
        digest: [u8; 32],
        timeout: f64,
        device: Option<average::OnDevice<'_>>,
    ) -> PyResult<Averager> {
        let settings = settings(name, interval, codec.map(Codec::core), Some((self.core(), digest)), true)?;
        let lane_device = |device: &CudaDevice| Arc::new(LaneDevice::new(device.context()));
        // SAFETY: the caller's promise in the docstring of this method.
        let model = unsafe { average::model(py, (weights, buffers), lock, device, lane_device) };
        let model = model.map_err(|e| errors::raise(py, e))?;
        let deadline = Deadline::after(seconds("timeout", timeout)?);
        let core = interrupt::run_on_thread(py, move || core::Averager::join(model, settings, &deadline))?;
        Ok(Averager::of(core, self.core.rank()))
    }
}
