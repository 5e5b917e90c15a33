//! Mutual TLS between the processes of a job: each shows a certificate of the job's own authority, and talks
//! to no process without one. A certificate says also whether it is a server's or a trainer's. The folder holds what a Kubernetes TLS secret holds: `ca.crt`, `tls.crt`, `tls.key`.
//! Servers shake hands here and not in the transport, which would drop those it refuses without a word.

use std::any::Any;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use std::{fmt, fs, io};

use futures::{Stream, StreamExt as _};
use psjobs_api::Role;
use psjobs_api::certificates::{AUTHORITY, CERTIFICATE, KEY, NAME, role_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{CipherSuite, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::address_limit::AddressLimit;
use crate::peer_role::Admitted;

/// How long a peer may take to show its certificate.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at once. A silent peer delays others only when as many are silent.
const HANDSHAKES: usize = 1024;
/// Handshakes of them from one address. The trainers of a node may share its address, and a handshake takes milliseconds.
const HANDSHAKES_OF_ADDRESS: usize = 64;

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not there.
    #[error("cannot read {}; the folder for TLS needs ca.crt, tls.crt and tls.key, as `psjobs certificates DIR` writes them to DIR/ps and DIR/trainer", file.display())]
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
        /// A description of the contents that are expected.
        wanted: &'static str,
    },
}

/// Certificates in PEM that hold what no certificate holds.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DamagedError {
    #[error("this is no PEM")]
    Pem(#[from] pem::Error),
    #[error("the key or a certificate is damaged")]
    Certificate(#[from] rustls::Error),
    #[error("the authority is damaged")]
    Authority(#[from] VerifierBuilderError),
}

/// The certificate of a process, and the authority by which it checks others.
pub struct Credentials {
    authority: String,
    certificate: String,
    key: String,
    refused: AtomicU64,
}

impl Credentials {
    /// Reads the three files of `folder`.
    ///
    /// # Errors
    /// The file that is missing or holds something else.
    pub fn load(folder: &Path) -> Result<Self, TlsError> {
        // The transport's clients take that of the process.
        drop(cryptography());
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
        Ok(Self {
            authority: read(AUTHORITY, "CERTIFICATE")?,
            certificate: read(CERTIFICATE, "CERTIFICATE")?,
            key: read(KEY, "PRIVATE KEY")?,
            refused: AtomicU64::new(0),
        })
    }

    /// Peers that could not show a certificate of the job's authority so far.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Returns how to connect to a process of `role`, which shows a certificate of that role; `None` takes any process of
    /// the job.
    pub(crate) fn client(&self, role: Option<Role>) -> ClientTlsConfig {
        let identity = Identity::from_pem(&self.certificate, &self.key);
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.authority))
            .identity(identity)
            .domain_name(role.map_or(NAME, role_name))
    }

    /// Returns those of `incoming` that show a certificate of the job's authority; the others are counted and named.
    pub(crate) fn admit<S: AsyncRead + AsyncWrite + Connected + Unpin>(
        self: &Arc<Self>,
        incoming: impl Stream<Item = io::Result<S>>,
    ) -> Result<impl Stream<Item = io::Result<Admitted<S>>>, DamagedError> {
        let acceptor = TlsAcceptor::from(Arc::new(self.server()?));
        let (door, handshakes) = (self.clone(), AddressLimit::new(HANDSHAKES_OF_ADDRESS));
        let hands = incoming.map(move |stream| {
            let (acceptor, door) = (acceptor.clone(), door.clone());
            let begun = stream.map(|stream| (handshakes.enter(address(&stream).map(|peer| peer.ip())), stream));
            async move {
                match begun {
                    Ok((Some(_under_way), stream)) => door.shake_hands(&acceptor, stream).await.map(Ok),
                    Ok((None, stream)) => {
                        door.refuse(address(&stream), "too many connections of its address have yet to show one");
                        None
                    }
                    Err(error) => Some(Err(error)),
                }
            }
        });
        Ok(hands.buffer_unordered(HANDSHAKES).filter_map(std::future::ready))
    }

    async fn shake_hands<S: AsyncRead + AsyncWrite + Connected + Unpin>(
        &self,
        acceptor: &TlsAcceptor,
        stream: S,
    ) -> Option<Admitted<S>> {
        let peer = address(&stream);
        let why = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => return Some(Admitted::new(stream)),
            // Somebody who only looked whether there is a server, or has gone away.
            Ok(Err(error)) if error.kind() != io::ErrorKind::InvalidData => {
                tracing::debug!(peer = name(peer), %error, "a connection ended before its handshake");
                return None;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("it showed none within {} s", HANDSHAKE.as_secs()),
        };
        self.refuse(peer, &why);
        None
    }

    /// Counts a peer without a certificate, and names it in the log.
    fn refuse(&self, peer: Option<SocketAddr>, why: &str) {
        let refused = self.refused.fetch_add(1, Relaxed) + 1;
        // One that tries for ever fills no log.
        if refused.is_power_of_two() {
            tracing::warn!(peer = name(peer), why, refused, "refused a peer without a certificate of this job");
        }
    }

    fn server(&self) -> Result<rustls::ServerConfig, DamagedError> {
        let (provider, roots) = (cryptography(), self.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone()).build()?;
        let (shown, key) = self.shown()?;
        let builder = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = builder.with_client_cert_verifier(verifier).with_single_cert(shown, key)?;
        config.alpn_protocols.push(b"h2".to_vec());
        Ok(config)
    }

    /// By whom the others are known.
    fn roots(&self) -> Result<RootCertStore, DamagedError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(self.authority.as_bytes()) {
            roots.add(certificate?)?;
        }
        Ok(roots)
    }

    /// Returns the certificate chain and key that the others see.
    fn shown(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), DamagedError> {
        let shown = CertificateDer::pem_slice_iter(self.certificate.as_bytes()).collect::<Result<_, _>>()?;
        Ok((shown, PrivateKeyDer::from_pem_slice(self.key.as_bytes())?))
    }
}

/// Returns where a connection comes from, as far as it is known.
pub(crate) fn address<S: Connected>(stream: &S) -> Option<SocketAddr> {
    let info = stream.connect_info();
    (&info as &dyn Any).downcast_ref::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr)
}

fn name(peer: Option<SocketAddr>) -> String {
    peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string())
}

/// Returns the cryptography of all TLS of this process, and makes it that of libraries which take the process's: the only
/// place that chooses one, so that it does not depend on what needs one first (certificates, a bucket, MLflow). What the
/// program itself has chosen before stays.
pub fn cryptography() -> Arc<CryptoProvider> {
    if CryptoProvider::get_default().is_none() {
        // Another thread may have been faster, with the same.
        drop(preferred().install_default());
    }
    CryptoProvider::get_default().cloned().unwrap_or_else(|| preferred().into())
}

/// Puts AES with 128 bits first, where both sides have it: no weaker here, and a third less work than 256 bits, which
/// is most of what TLS costs a step.
fn preferred() -> CryptoProvider {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    provider
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
    fn connections_prefer_aes_with_128_bits_and_have_all_others() {
        let (found, ring) = (cryptography(), rustls::crypto::ring::default_provider());
        let default = CryptoProvider::get_default().expect("one is installed");
        assert_eq!(format!("{:?}", found.cipher_suites), format!("{:?}", default.cipher_suites));
        assert_eq!(found.cipher_suites[0].suite(), CipherSuite::TLS13_AES_128_GCM_SHA256);
        assert!(ring.cipher_suites.iter().all(|suite| found.cipher_suites.contains(suite)));
        assert_eq!(found.cipher_suites.len(), ring.cipher_suites.len());
    }

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
