//! Mutual TLS between the processes of a job: each shows a certificate of the job's own authority, and talks
//! to nobody who cannot. The folder holds what a Kubernetes TLS secret holds: `ca.crt`, `tls.crt`, `tls.key`.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use rustls::CipherSuite;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// The name in every certificate of a job. It is the authority that tells jobs apart, not the host: pods come and
/// go, and their addresses with them.
pub const NAME: &str = "psjob";

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not there.
    #[error("cannot read {}; the folder for TLS needs ca.crt, tls.crt and tls.key, as `psjobs certificates DIR` writes them", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file holds something else.
    #[error("{} holds no {wanted} in PEM; make the folder anew with `psjobs certificates DIR`", file.display())]
    NotPem {
        /// The file.
        file: PathBuf,
        /// What it should hold.
        wanted: &'static str,
    },
}

/// What a process shows, and by what it knows the others.
#[derive(Clone)]
pub struct Credentials {
    authority: Certificate,
    identity: Identity,
}

impl Credentials {
    /// Reads the three files of `folder`.
    ///
    /// # Errors
    /// The file that is missing or holds something else.
    pub fn load(folder: &Path) -> Result<Self, TlsError> {
        prefer_short_keys();
        let read = |name: &str, wanted: &'static str| {
            let file = folder.join(name);
            let text = match fs::read_to_string(&file) {
                Ok(text) => text,
                Err(source) => return Err(TlsError::Unreadable { file, source }),
            };
            // A key's line may also say of which kind it is.
            if !text.lines().any(|line| line.starts_with("-----BEGIN ") && line.ends_with(&format!("{wanted}-----"))) {
                return Err(TlsError::NotPem { file, wanted });
            }
            Ok(text)
        };
        let (certificate, private_key) = ("CERTIFICATE", "PRIVATE KEY");
        Ok(Self {
            authority: Certificate::from_pem(read("ca.crt", certificate)?),
            identity: Identity::from_pem(read("tls.crt", certificate)?, read("tls.key", private_key)?),
        })
    }

    pub(crate) fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new().ca_certificate(self.authority.clone()).identity(self.identity.clone()).domain_name(NAME)
    }

    pub(crate) fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new().identity(self.identity.clone()).client_ca_root(self.authority.clone())
    }
}

/// Puts AES with 128 bits first, where both sides have it: no weaker here, and a third less work than 256 bits, which
/// is most of what TLS costs a step.
fn prefer_short_keys() {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    // What the program has chosen before stays.
    drop(provider.install_default());
}

/// Says nothing of the key.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_missing_or_wrong_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in [("ca.crt", "CERTIFICATE"), ("tls.crt", "CERTIFICATE"), ("tls.key", "PRIVATE KEY")] {
            let missing = Credentials::load(folder.path()).expect_err(name).to_string();
            assert!(missing.contains(name) && missing.contains("psjobs certificates"), "{missing}");
            fs::write(folder.path().join(name), "nothing").expect("written");
            let wrong = Credentials::load(folder.path()).expect_err(name).to_string();
            assert!(wrong.contains(name) && wrong.contains(text), "{wrong}");
            fs::write(folder.path().join(name), format!("-----BEGIN {text}-----\n")).expect("written");
        }
        assert!(Credentials::load(folder.path()).is_ok());
    }
}
