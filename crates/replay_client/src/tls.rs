//! The client's side of TLS. Trusts only the certificates of a PEM file, an authority's or the server's own, and no public certificate
//! authorities.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use replay_link::error::{Error, Result};
use replay_link::tls::{VERSIONS, certificates, date};

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

/// The reason for which a handshake failed, and what to do.
pub fn advice(error: &rustls::Error) -> String {
    use CertificateError::{ExpiredContext, NotValidForNameContext, NotValidYetContext};
    match error {
        rustls::Error::InvalidCertificate(ExpiredContext { not_after, .. }) => format!(
            "the server's certificate expired on {}; start the server with a new one (--tls-cert), or send it SIGHUP once the file has it",
            date(*not_after)
        ),
        rustls::Error::InvalidCertificate(NotValidYetContext { not_before, .. }) => format!(
            "the server's certificate is not valid before {}; check the clock of this machine, or start the server with another \
             certificate (--tls-cert)",
            date(*not_before)
        ),
        rustls::Error::InvalidCertificate(NotValidForNameContext { .. }) => {
            format!("{error}; connect to a host that the certificate names, or make one for this host")
        }
        rustls::Error::InvalidCertificate(_) => {
            format!("{error}; put the server's certificate or its authority's into tls_ca")
        }
        rustls::Error::InvalidMessage(_) => {
            "the server answers without TLS; write innet://, without tls_ca, or start the server with --tls-cert and --tls-key".to_owned()
        }
        _ => format!("{error}; start the server with --tls-cert and --tls-key"),
    }
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
