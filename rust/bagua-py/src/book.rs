//! `BookServer` and `Book`: the address book of elastic jobs, and a connection to it.

use std::path::PathBuf;
use std::sync::Mutex;

use bagua_core::group::{self, Access};
use bagua_core::wait::lock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::interrupt;
use crate::tls::{Tls, tls_of};

/// Serves an address book on `host` ("": every address) and `port` (0: any free one) until `stop`. The entries are kept in the file
/// `kept_in`, if it is given, for a later server.
///
/// Raises BaguaError, whose cause is the OSError, when it cannot listen there or use the file.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct BookServer {
    port: u16,
    /// `None` after `stop`.
    core: Mutex<Option<group::BookServer>>,
}

#[pymethods]
impl BookServer {
    #[new]
    #[pyo3(signature = (host, port, secret, tls=None, kept_in=None))]
    fn new(
        py: Python<'_>,
        host: &str,
        port: u16,
        secret: Vec<u8>,
        tls: Option<Bound<'_, Tls>>,
        kept_in: Option<PathBuf>,
    ) -> PyResult<BookServer> {
        let tls = tls_of(tls.as_ref());
        let access = Access { secret: &secret, tls: tls.as_ref() };
        let start = || group::BookServer::start(host, port, &access, kept_in.as_deref());
        let core = py.detach(start).map_err(|e| errors::raise(py, e))?;
        Ok(BookServer { port: core.address().port(), core: Mutex::new(Some(core)) })
    }

    /// The port that it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Ends it. Idempotent.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.core).take()));
    }
}

/// A connection to the server of an address book: entries, which are bytes, by name.
///
/// Raises BaguaTimeoutError when it is not served within `timeout` seconds, BaguaError when the server has another secret or only one of
/// the two uses TLS; the methods raise BaguaError when the server does not answer.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Book {
    core: group::Book,
}

#[pymethods]
impl Book {
    #[new]
    #[pyo3(signature = (host, port, secret, timeout, tls=None))]
    fn new(
        py: Python<'_>,
        host: String,
        port: u16,
        secret: Vec<u8>,
        timeout: f64,
        tls: Option<Bound<'_, Tls>>,
    ) -> PyResult<Book> {
        let (limit, tls) = (errors::seconds("timeout", timeout)?, tls_of(tls.as_ref()));
        let core = interrupt::run_on_thread(py, move || {
            let access = Access { secret: &secret, tls: tls.as_ref() };
            group::Book::connect(&host, port, &access, limit)
        })?;
        Ok(Book { core })
    }

    /// The entry of a name; None when it has none.
    fn read<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = py.detach(|| self.core.read(name)).map_err(|e| errors::raise(py, e))?;
        Ok(found.map(|entry| PyBytes::new(py, &entry)))
    }

    /// Replaces the entry of a name.
    fn write(&self, py: Python<'_>, name: &str, entry: Vec<u8>) -> PyResult<()> {
        py.detach(|| self.core.write(name, &entry)).map_err(|e| errors::raise(py, e))
    }

    /// Writes an entry if the name has none, and returns the one that it has then.
    fn claim<'py>(&self, py: Python<'py>, name: &str, entry: Vec<u8>) -> PyResult<Bound<'py, PyBytes>> {
        let found = py.detach(|| self.core.claim(name, &entry)).map_err(|e| errors::raise(py, e))?;
        Ok(PyBytes::new(py, &found))
    }
}
