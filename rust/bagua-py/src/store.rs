//! `StoreServer` and `Store`: a key-value store for the processes of a job, by a server or in files.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bagua_core::group::{self, Access};
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::interrupt;
use crate::tls::{Tls, tls_of};

/// A server of a store on `host` ("": every address) and `port` (0: any free port), until `stop`. With `kept_in`, the
/// values are stored in that file for a later server.
///
/// Raises BaguaError, whose cause is the OSError, if the server cannot listen there or use the file.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct StoreServer {
    port: u16,
    /// The server. `None` after `stop`.
    core: Mutex<Option<group::StoreServer>>,
}

#[pymethods]
impl StoreServer {
    #[new]
    #[pyo3(signature = (host, port, secret, tls=None, kept_in=None))]
    fn new(
        py: Python<'_>,
        host: &str,
        port: u16,
        secret: Vec<u8>,
        tls: Option<Bound<'_, Tls>>,
        kept_in: Option<PathBuf>,
    ) -> PyResult<StoreServer> {
        let tls = tls_of(tls.as_ref());
        let access = Access { secret: &secret, tls: tls.as_ref() };
        let start = || group::StoreServer::start(host, port, &access, kept_in.as_deref());
        let core = py.detach(start).map_err(|e| errors::raise(py, e))?;
        Ok(StoreServer { port: core.address().port(), core: Mutex::new(Some(core)) })
    }

    /// Port on which the server listens.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Ends the server. Further calls do nothing.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.core).take()));
    }
}

/// Values, which are bytes, by key, with the methods of torch.distributed.Store. The methods raise BaguaError if the
/// store does not answer or cannot store a value.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Store {
    core: Arc<dyn group::Store>,
}

#[pymethods]
impl Store {
    /// Connects to a `StoreServer`. Raises BaguaTimeoutError if no server answers within `timeout` seconds, BaguaError
    /// if the server has another secret or only one side uses TLS.
    #[staticmethod]
    #[pyo3(signature = (host, port, secret, timeout, tls=None))]
    fn tcp(
        py: Python<'_>,
        host: String,
        port: u16,
        secret: Vec<u8>,
        timeout: f64,
        tls: Option<Bound<'_, Tls>>,
    ) -> PyResult<Store> {
        let (limit, tls) = (errors::seconds("timeout", timeout)?, tls_of(tls.as_ref()));
        let core = interrupt::run_on_thread(py, move || {
            let access = Access { secret: &secret, tls: tls.as_ref() };
            group::TcpStore::connect(&host, port, &access, limit)
        })?;
        Ok(Store { core: Arc::new(core) })
    }

    /// Returns a store in the files of a directory, which only their owner can read.
    #[staticmethod]
    fn files(directory: PathBuf) -> Store {
        Store { core: Arc::new(group::FileStore::in_directory(&directory)) }
    }

    /// Sets the value of a key.
    fn set(&self, py: Python<'_>, key: &str, value: Vec<u8>) -> PyResult<()> {
        py.detach(|| self.core.set(key, &value)).map_err(|e| errors::raise(py, e))
    }

    /// Returns the value of a key, or None if it has none. Does not wait.
    fn get<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = py.detach(|| self.core.get(key)).map_err(|e| errors::raise(py, e))?;
        Ok(found.map(|value| PyBytes::new(py, &value)))
    }

    /// Sets the value of a key unless it has one. Returns the value that the key has then.
    fn set_new<'py>(&self, py: Python<'py>, key: &str, value: Vec<u8>) -> PyResult<Bound<'py, PyBytes>> {
        let found = py.detach(|| self.core.set_new(key, &value)).map_err(|e| errors::raise(py, e))?;
        Ok(PyBytes::new(py, &found))
    }

    /// Adds `amount` to the number that is the value of a key (0 if it has none), and returns the sum.
    fn add(&self, py: Python<'_>, key: &str, amount: i64) -> PyResult<i64> {
        py.detach(|| self.core.add(key, amount)).map_err(|e| errors::raise(py, e))
    }

    /// Waits until all keys have a value. Raises BaguaTimeoutError after `timeout`, a timedelta.
    fn wait(&self, py: Python<'_>, keys: Vec<String>, timeout: Duration) -> PyResult<()> {
        let core = Arc::clone(&self.core);
        interrupt::run_on_thread(py, move || {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            core.wait(&keys, timeout, &mut || Ok(()))
        })
    }
}
