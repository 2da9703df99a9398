//! The server's side of TLS, from PEM files with rustls, and helpers of both sides. TLS 1.3 only: earlier versions can export the same
//! keying material for two sessions.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ConnectionCommon, ServerConfig, SupportedProtocolVersion};
use tokio_rustls::TlsAcceptor;

use crate::error::{Error, Result};
use replay_wire::auth::{CHANNEL_BINDING_LABEL, ChannelBinding};

/// The accepted versions.
pub(crate) const VERSIONS: [&SupportedProtocolVersion; 1] = [&rustls::version::TLS13];

/// The TLS error of a failed handshake; `None` if the connection broke.
pub(crate) fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Exported keying material, which binds the token's proof to this session (channel binding).
///
/// # Errors
/// [`Error::Internal`] before the end of the handshake.
pub(crate) fn channel_binding<Side>(session: &ConnectionCommon<Side>) -> Result<ChannelBinding> {
    session
        .export_keying_material([0; 32], CHANNEL_BINDING_LABEL, Some(&[]))
        .map_err(|error| Error::Internal(format!("TLS exports no keying material: {error}")))
}

/// The certificates of a PEM file, at least one. Errors name the configuration's `field`.
///
/// # Errors
/// [`Error::Config`].
pub(crate) fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .and_then(|chain: Vec<_>| match chain.is_empty() {
            true => Err(pem::Error::NoItemsFound),
            false => Ok(chain),
        })
        .map_err(|error| unreadable(field, path, &error))
}

/// An acceptor for a certificate chain (the server's own first) and its private key, both PEM files. Clients have no
/// certificates; they are authenticated by the token.
///
/// # Errors
/// [`Error::Config`] with the file that is missing, not of its kind, or does not match the other one.
pub fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor> {
    let chain = certificates("tls_cert", certificate)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable("tls_key", key, &error))?;
    let refused = |error: rustls::Error| {
        Error::Config(match error {
            rustls::Error::InconsistentKeys(_) => format!(
                "tls_key {} is not the key of the certificate in tls_cert {}",
                key.display(),
                certificate.display()
            ),
            error => {
                format!("TLS cannot use tls_cert {} with tls_key {}: {error}", certificate.display(), key.display())
            }
        })
    };
    // An explicit provider, independent of the process's default.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&VERSIONS)
        .map_err(refused)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(refused)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn unreadable(field: &str, path: &Path, error: &pem::Error) -> Error {
    let path = path.display();
    Error::Config(match error {
        pem::Error::NoItemsFound => {
            let what = match field {
                "tls_key" => "a private key (-----BEGIN PRIVATE KEY-----)",
                _ => "a certificate (-----BEGIN CERTIFICATE-----)",
            };
            format!("{field} {path} does not hold {what}")
        }
        pem::Error::Io(error) => format!("{field} {path} cannot be read: {error}"),
        error => format!("{field} {path} is not a PEM file: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_bad_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
        let other = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
        let certificate = file("cert.pem", &made.cert.pem());
        let key = file("key.pem", &made.signing_key.serialize_pem());
        let other_key = file("other.pem", &other.signing_key.serialize_pem());
        let missing = folder.path().join("missing.pem");
        let empty = file("empty.pem", "");

        let error = |certificate: &Path, key: &Path| acceptor(certificate, key).err().unwrap().to_string();
        assert!(acceptor(&certificate, &key).is_ok());
        assert!(error(&missing, &key).contains("missing.pem cannot be read"));
        assert!(error(&certificate, &missing).contains("missing.pem cannot be read"));
        assert!(error(&empty, &key).contains("empty.pem does not hold a certificate"));
        assert!(error(&key, &key).contains("key.pem does not hold a certificate"));
        assert!(error(&certificate, &certificate).contains("does not hold a private key"));
        assert!(error(&certificate, &other_key).contains("is not the key of the certificate"));
    }
}
