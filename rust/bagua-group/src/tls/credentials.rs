//! The keys of the two ends of a TLS connection, and the checks of the other end's key.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    AlwaysResolvesClientRawPublicKeys, ResolvesClientCert, verify_server_cert_signed_by_trust_anchor,
};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error as Fault, PeerIncompatible, RootCertStore,
    SignatureScheme,
};

use super::super::handshake::Key;
use crate::error::{Error, Result};

/// The DER encoding of an Ed25519 private key before its 32 bytes (RFC 8410, section 7).
const ED25519_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Returns TLS with exactly what the ranks of a job need: three cipher suites and one key exchange. The first suite is
/// the fastest on processors with AES instructions.
fn provider() -> Arc<CryptoProvider> {
    use ring::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    Arc::new(CryptoProvider {
        cipher_suites: vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256],
        kx_groups: vec![ring::kx_group::X25519],
        ..ring::default_provider()
    })
}

/// The way in which the two ends of a TLS connection authenticate each other.
#[derive(Clone, Debug)]
pub enum Tls {
    /// A key pair that is derived from the job's secret.
    Secret,
    /// Certificates that a CA has signed.
    Certificates(Arc<Certificates>),
}

impl Tls {
    /// Authenticates by certificates in PEM: this rank's certificate with intermediate ones, its private key, and the
    /// certificates of the CA that signed the certificates of all ranks.
    ///
    /// # Errors
    /// `InvalidArgument` that says which of the three cannot be used, and why.
    pub fn by_certificates(certificate: &[u8], key: &[u8], ca: &[u8]) -> Result<Tls> {
        let provider = provider();
        let invalid = |what: &str, why: String| Error::InvalidArgument(format!("{what}: {why}"));
        let all = |pem: &[u8], what: &str| {
            let all: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            match all {
                Ok(all) if !all.is_empty() => Ok(all),
                Ok(_) => Err(invalid(what, "no certificate in PEM".to_owned())),
                Err(why) => Err(invalid(what, why.to_string())),
            }
        };
        let chain = all(certificate, "the certificate")?;
        // PKCS #8 says in its label that a key is encrypted (RFC 7468, section 11), and the older formats in a header
        // (RFC 1421, section 4.6.1.1).
        let is_encrypted = ["-----BEGIN ENCRYPTED PRIVATE KEY-----", "Proc-Type: 4,ENCRYPTED"]
            .iter()
            .any(|mark| key.windows(mark.len()).any(|window| window == mark.as_bytes()));
        if is_encrypted {
            let why = "it is encrypted, and there is no passphrase to give (openssl pkey -in KEY -out FILE writes it without)";
            return Err(invalid("the private key", why.to_owned()));
        }
        let private = PrivateKeyDer::from_pem_slice(key).map_err(|why| {
            let why = match why {
                rustls::pki_types::pem::Error::NoItemsFound => "no private key in PEM".to_owned(),
                other => other.to_string(),
            };
            invalid("the private key", why)
        })?;
        let mut roots = RootCertStore::empty();
        for root in all(ca, "the CA")? {
            roots.add(root).map_err(|why| invalid("the CA", why.to_string()))?;
        }
        let key = CertifiedKey::from_der(chain, private, &provider).map_err(|why| match why {
            Fault::InconsistentKeys(_) => invalid("the private key", "it is not that of the certificate".to_owned()),
            other => invalid("the certificate or the private key", other.to_string()),
        })?;
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|why| invalid("the CA", why.to_string()))?;
        let algorithms = provider.signature_verification_algorithms;
        let certificates =
            Certificates { provider, key: Arc::new(key), servers: Arc::new(SignedBy { roots, algorithms }), clients };
        // The checks that the other ranks will make.
        let (own, intermediates) = certificates.key.cert.split_first().expect("a chain with a certificate");
        let now = UnixTime::now();
        let checked = certificates.servers.check(own, intermediates, now);
        let checked = checked.and_then(|()| certificates.clients.verify_client_cert(own, intermediates, now).map(drop));
        checked.map_err(|why| invalid("the certificate", format!("the other ranks would refuse it: {why}")))?;
        Ok(Tls::Certificates(Arc::new(certificates)))
    }

    /// Returns a number for the kind of authentication, which ranks compare. 0 means no TLS.
    pub(in super::super) fn code(tls: Option<&Tls>) -> u8 {
        match tls {
            None => 0,
            Some(Tls::Secret) => 1,
            Some(Tls::Certificates(_)) => 2,
        }
    }

    /// Returns the name of a code, for error texts.
    pub(in super::super) fn describe(code: u8) -> &'static str {
        match code {
            0 => "no TLS",
            1 => "TLS by the secret",
            2 => "TLS by certificates",
            _ => "TLS of an unknown kind",
        }
    }

    pub(super) fn credentials(&self, secret: &[u8]) -> Result<Credentials> {
        match self {
            Tls::Secret if secret.is_empty() => {
                Err(Error::InvalidArgument("TLS without certificates needs a secret".to_owned()))
            }
            Tls::Secret => SharedKeyPair::new(secret).map(|shared| Credentials::Secret(Arc::new(shared))),
            Tls::Certificates(certificates) => Ok(Credentials::Certificates(Arc::clone(certificates))),
        }
    }
}

/// [`Tls`] together with the secret.
pub(super) enum Credentials {
    Secret(Arc<SharedKeyPair>),
    Certificates(Arc<Certificates>),
}

impl Credentials {
    pub(super) fn provider(&self) -> &Arc<CryptoProvider> {
        match self {
            Credentials::Secret(shared) => &shared.provider,
            Credentials::Certificates(certificates) => &certificates.provider,
        }
    }

    pub(super) fn server_verifier(&self) -> Arc<dyn ServerCertVerifier> {
        match self {
            Credentials::Secret(shared) => Arc::<SharedKeyPair>::clone(shared),
            Credentials::Certificates(certificates) => Arc::<SignedBy>::clone(&certificates.servers),
        }
    }

    pub(super) fn client_verifier(&self) -> Arc<dyn ClientCertVerifier> {
        match self {
            Credentials::Secret(shared) => Arc::<SharedKeyPair>::clone(shared),
            Credentials::Certificates(certificates) => Arc::clone(&certificates.clients),
        }
    }

    pub(super) fn server_resolver(&self) -> Arc<dyn ResolvesServerCert> {
        match self {
            Credentials::Secret(shared) => Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::clone(&shared.key))),
            Credentials::Certificates(certificates) => Arc::new(SingleCertAndKey::from(Arc::clone(&certificates.key))),
        }
    }

    pub(super) fn client_resolver(&self) -> Arc<dyn ResolvesClientCert> {
        match self {
            Credentials::Secret(shared) => Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&shared.key))),
            Credentials::Certificates(certificates) => Arc::new(SingleCertAndKey::from(Arc::clone(&certificates.key))),
        }
    }
}

/// The key pair that all holders of a secret have. As a verifier, it accepts this public key and no other.
#[derive(Debug)]
pub(super) struct SharedKeyPair {
    provider: Arc<CryptoProvider>,
    /// The raw public key, in place of a certificate, and the private key.
    key: Arc<CertifiedKey>,
}

impl SharedKeyPair {
    fn new(secret: &[u8]) -> Result<SharedKeyPair> {
        let failed = |why: String| Error::other(format!("TLS: the key of the secret: {why}"));
        let der = [&ED25519_PREFIX[..], &Key::of_tls(secret).into_seed()].concat();
        let private = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(der)).map_err(|e| failed(e.to_string()))?;
        let public = private.public_key().ok_or_else(|| failed("it has no public key".to_owned()))?;
        let public = CertificateDer::from(public.as_ref().to_vec());
        Ok(SharedKeyPair { provider: provider(), key: Arc::new(CertifiedKey::new(vec![public], private)) })
    }

    fn check(&self, theirs: &CertificateDer<'_>) -> std::result::Result<(), Fault> {
        // Public keys are no secret, so the time of the comparison may depend on them.
        match self.key.end_entity_cert()? == theirs {
            true => Ok(()),
            false => Err(Fault::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn signed(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, Fault> {
        let key = SubjectPublicKeyInfoDer::from(cert.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.provider.signature_verification_algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// The methods that the verifiers of servers and of clients have in common. They call `signed` and `schemes` of the
/// type that uses this macro. Only TLS 1.3 is supported.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _cert: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> std::result::Result<HandshakeSignatureValid, Fault> {
            Err(Fault::PeerIncompatible(PeerIncompatible::Tls12NotOffered))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> std::result::Result<HandshakeSignatureValid, Fault> {
            self.signed(message, cert, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.schemes()
        }
    };
}

impl ServerCertVerifier for SharedKeyPair {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, Fault> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    signatures!();

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for SharedKeyPair {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> std::result::Result<ClientCertVerified, Fault> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    signatures!();

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// A rank's certificate and key, and the verifiers of the other ranks' certificates.
#[derive(Debug)]
pub struct Certificates {
    provider: Arc<CryptoProvider>,
    /// This rank's certificate with intermediate ones, and its private key.
    key: Arc<CertifiedKey>,
    /// Verifier for the rank that accepted the connection.
    servers: Arc<SignedBy>,
    /// Verifier for the rank that connected.
    clients: Arc<dyn ClientCertVerifier>,
}

/// Accepts a server whose certificate a CA has signed, whatever its name is.
#[derive(Debug)]
struct SignedBy {
    /// Certificates of the CA.
    roots: Arc<RootCertStore>,
    /// Algorithms of signatures in certificates and handshakes.
    algorithms: WebPkiSupportedAlgorithms,
}

impl SignedBy {
    fn check(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> std::result::Result<(), Fault> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)
    }

    fn signed(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, Fault> {
        verify_tls13_signature(message, cert, signature, &self.algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for SignedBy {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, Fault> {
        self.check(end_entity, intermediates, now).map(|()| ServerCertVerified::assertion())
    }

    signatures!();
}
