//! `Tls`: the encryption of a job's TCP connections, and how the two ends prove who they are.

use bagua_core::error::Error;
use bagua_core::group;
use pyo3::prelude::*;

use crate::errors;

/// A TLS 1.3 configuration. Without arguments, ranks authenticate with a key pair derived from the job's secret. With
/// the PEM texts of this rank's certificate, its private key and the CA, ranks authenticate with certificates that the
/// CA signed.
///
/// Raises ValueError, which says which argument cannot be used and why.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct Tls {
    core: group::Tls,
}

impl Tls {
    pub fn core(&self) -> group::Tls {
        self.core.clone()
    }
}

#[pymethods]
impl Tls {
    #[new]
    #[pyo3(signature = (certificate=None, key=None, ca=None))]
    fn new(py: Python<'_>, certificate: Option<Vec<u8>>, key: Option<Vec<u8>>, ca: Option<Vec<u8>>) -> PyResult<Tls> {
        let core = match (certificate, key, ca) {
            (None, None, None) => Ok(group::Tls::Secret),
            (Some(certificate), Some(key), Some(ca)) => group::Tls::by_certificates(&certificate, &key, &ca),
            _ => {
                Err(Error::InvalidArgument("TLS needs the certificate, the key and the CA, or none of them".to_owned()))
            }
        };
        core.map(|core| Tls { core }).map_err(|e| errors::raise(py, e))
    }
}

/// Returns the core's TLS configuration of an argument.
pub fn tls_of(tls: Option<&Bound<'_, Tls>>) -> Option<group::Tls> {
    tls.map(|tls| tls.get().core())
}
