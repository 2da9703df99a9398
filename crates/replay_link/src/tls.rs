//! The server's side of TLS, from PEM files with rustls, and helpers of both sides. TLS 1.3 only: earlier versions can export the same
//! keying material for two sessions.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::{ConnectionCommon, ServerConfig, SupportedProtocolVersion};
use tokio_rustls::TlsAcceptor;
use webpki::{EndEntityCert, KeyUsage};

use crate::error::{Error, Result};
use replay_wire::auth::{CHANNEL_BINDING_LABEL, ChannelBinding};

/// The accepted versions.
pub const VERSIONS: [&SupportedProtocolVersion; 1] = [&rustls::version::TLS13];

/// The TLS error of a failed handshake; `None` if the connection broke.
pub fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Exported keying material, which binds the token's proof to this session (channel binding).
///
/// # Errors
/// [`Error::Internal`] before the end of the handshake.
pub fn channel_binding<Side>(session: &ConnectionCommon<Side>) -> Result<ChannelBinding> {
    session
        .export_keying_material([0; 32], CHANNEL_BINDING_LABEL, Some(&[]))
        .map_err(|error| Error::Internal(format!("TLS exports no keying material: {error}")))
}

/// The certificates of a PEM file, at least one. Errors name the configuration's `field`.
pub fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .and_then(|chain: Vec<_>| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) })
        .map_err(|error| unreadable(field, path, &error))
}

/// The first and the last second in which each certificate of a chain is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dates {
    /// First second.
    pub begin: UnixTime,
    /// Last second.
    pub end: UnixTime,
}

/// What to do about a certificate with a [problem](Dates::problem).
pub const RENEW: &str =
    "clients that trust its authority refuse it; put a valid one into tls_cert, and send SIGHUP to a server that runs";

impl Dates {
    /// Common dates of a chain, the server's certificate first. Others that cannot be read do not count: clients may not need them.
    fn of_chain(chain: &[CertificateDer<'_>]) -> std::result::Result<Self, webpki::Error> {
        let others = chain[1..].iter().filter_map(|certificate| Self::of(certificate).ok());
        let both = |one: Self, other: Self| Dates { begin: one.begin.max(other.begin), end: one.end.min(other.end) };
        Ok(others.fold(Self::of(&chain[0])?, both))
    }

    /// Reads them from webpki's errors for the first second of all and the last one: it shows them in no other way.
    fn of(certificate: &CertificateDer<'_>) -> std::result::Result<Self, webpki::Error> {
        let certificate = EndEntityCert::try_from(certificate)?;
        let verify = |seconds| {
            let at = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
            certificate.verify_for_usage(&[], &[], &[], at, KeyUsage::server_auth(), None, None).err()
        };
        let begin = match verify(0) {
            Some(webpki::Error::CertNotValidYet { not_before, .. }) => not_before,
            // It was valid at the first second, too.
            _ => UnixTime::since_unix_epoch(Duration::ZERO),
        };
        match verify(u64::MAX) {
            Some(webpki::Error::CertExpired { not_after, .. }) => Ok(Dates { begin, end: not_after }),
            error => Err(error.unwrap_or(webpki::Error::InvalidCertValidity)),
        }
    }

    /// The reason for which clients that trust the certificate's authority refuse it now.
    pub fn problem(&self) -> Option<String> {
        let now = UnixTime::now();
        match (now < self.begin, now > self.end) {
            (true, _) => Some(format!("a certificate of tls_cert is not valid before {}", date(self.begin))),
            (_, true) => Some(format!("a certificate of tls_cert expired on {}", date(self.end))),
            _ => None,
        }
    }
}

/// A time as text.
pub fn date(at: UnixTime) -> String {
    /// The last second of the year 9999, the last one that a certificate can name.
    const LAST: u64 = 253_402_300_799;
    httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(at.as_secs().min(LAST)))
}

/// An acceptor for a certificate chain (the server's own first) and its private key, both PEM files, and the dates of the
/// chain. Clients have no certificates; they are authenticated by the token.
///
/// # Errors
/// [`Error::Config`] with the file that is missing, not of its kind, or does not match the other one.
pub fn acceptor(certificate: &Path, key: &Path) -> Result<(TlsAcceptor, Dates)> {
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
    let dates = Dates::of_chain(&chain).map_err(|error| {
        Error::Config(format!("tls_cert {} has no dates that can be read: {error}", certificate.display()))
    })?;
    // An explicit provider, independent of the process's default.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&VERSIONS)
        .map_err(refused)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(refused)?;
    Ok((TlsAcceptor::from(Arc::new(config)), dates))
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
    fn the_dates_are_those_in_which_the_whole_chain_is_valid() {
        let dated = |years: [i32; 2]| {
            let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            [params.not_before, params.not_after] = years.map(|year| rcgen::date_time_ymd(year, 1, 1));
            params
        };
        let key = || rcgen::KeyPair::generate().unwrap();
        let mut above = dated([2010, 2020]);
        above.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let above = rcgen::CertifiedIssuer::self_signed(above, key()).unwrap();
        let own_key = key();
        let folder = tempfile::tempdir().unwrap();
        let [chain, key] = ["chain.pem", "key.pem"].map(|name| folder.path().join(name));
        fs::write(&key, own_key.serialize_pem()).unwrap();
        for (own, [begin, end]) in
            [([2000, 3000], [2010, 2020]), ([2012, 2015], [2012, 2015]), ([2000, 2015], [2010, 2015])]
        {
            let own = dated(own).signed_by(&own_key, &above).unwrap();
            fs::write(&chain, own.pem() + &above.pem()).unwrap();
            let (_, dates) = acceptor(&chain, &key).unwrap();
            let expected = [begin, end].map(|year| format!("01 Jan {year} 00:00:00 GMT"));
            let found = [dates.begin, dates.end].map(|at| date(at).split_off("Sun, ".len()));
            assert_eq!(found, expected);
            assert!(dates.problem().unwrap().contains(&format!("expired on {}", date(dates.end))));
        }
    }

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
        let (_, dates) = acceptor(&certificate, &key).unwrap();
        // The first and the last day of rcgen's certificates.
        assert_eq!(date(dates.begin), "Wed, 01 Jan 1975 00:00:00 GMT");
        assert_eq!((date(dates.end), dates.problem()), ("Sun, 01 Jan 4096 00:00:00 GMT".to_owned(), None));
        assert!(error(&missing, &key).contains("missing.pem cannot be read"));
        assert!(error(&certificate, &missing).contains("missing.pem cannot be read"));
        assert!(error(&empty, &key).contains("empty.pem does not hold a certificate"));
        assert!(error(&key, &key).contains("key.pem does not hold a certificate"));
        assert!(error(&certificate, &certificate).contains("does not hold a private key"));
        assert!(error(&certificate, &other_key).contains("is not the key of the certificate"));
    }
}
