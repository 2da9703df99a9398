//! The client's side of TLS. Trusts only the certificates of a PEM file, an authority's or the server's own, and no public certificate
//! authorities.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::error::{Error, Result};
use crate::tls::{VERSIONS, certificates};

/// A TLS configuration that trusts the certificates in the PEM file `path`.
///
/// # Errors
/// [`Error::Config`] that names the file.
pub fn client_config(path: &Path) -> Result<Arc<ClientConfig>> {
    let refuse = |reason: String| Error::Config(format!("tls_ca {}: {reason}", path.display()));
    let trusted = certificates("tls_ca", path)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in &trusted {
        roots.add(certificate.clone()).map_err(|e| refuse(e.to_string()))?;
    }
    let authority = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|e| refuse(e.to_string()))?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&VERSIONS)
        .map_err(|e| refuse(e.to_string()))?
        // As strict as the default verifier, except for certificates trusted byte for byte.
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(TrustedFile { trusted, authority }))
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// Verifier that accepts the file's certificates, and certificates for the server's name signed by an authority in the file.
///
/// The first case is for `openssl req -x509`, which marks a server's own certificate as an authority's; the standard
/// verifier refuses such a certificate at the end of a chain. The server still has to prove that it holds the key. Name
/// and dates are not checked, since the certificate itself was agreed on.
#[derive(Debug)]
struct TrustedFile {
    trusted: Vec<CertificateDer<'static>>,
    authority: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for TrustedFile {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        if self.trusted.iter().any(|trusted| trusted == end_entity) {
            return Ok(ServerCertVerified::assertion());
        }
        self.authority.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }
}
