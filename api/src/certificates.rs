//! Certificates of the processes of a job for TLS: files with the names that a Kubernetes TLS secret gives them.
//! [`Certificates`], behind the `certificates` feature, makes them; the operator for a job, `psjobs certificates` by
//! hand. A job has two, one for its servers and one for its trainers, so that no trainer passes for a server.

use std::time::Duration;

use crate::Role;

/// How long the certificates hold that the operator makes for a job, and renews.
pub const LIFE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The name in every certificate of a job. The authority distinguishes jobs, not the host: pods come and
/// go, and their addresses with them.
pub const NAME: &str = "psjob";
/// File of the authority's certificate.
pub const AUTHORITY: &str = "ca.crt";
/// File of the processes' certificate.
pub const CERTIFICATE: &str = "tls.crt";
/// File of the key to it.
pub const KEY: &str = "tls.key";

/// The name in the certificates of one role, besides [`NAME`]: `ps.psjob` or `trainer.psjob`.
#[must_use]
pub const fn role_name(role: Role) -> &'static str {
    match role {
        Role::Server => "ps.psjob",
        Role::Trainer => "trainer.psjob",
    }
}

#[cfg(feature = "certificates")]
pub use make::{Certificates, Identity, MakeError};

#[cfg(feature = "certificates")]
mod make {
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
        date_time_ymd,
    };

    use super::{AUTHORITY, CERTIFICATE, KEY, NAME, role_name};
    use crate::Role;

    /// Certificates hold from so long ago on, as clocks of machines differ.
    const BEFORE: Duration = Duration::from_secs(24 * 60 * 60);

    /// No certificates could be made.
    #[derive(Debug, thiserror::Error)]
    #[error("cannot make certificates for {hosts}; names of hosts are made of ASCII letters, digits, dots and dashes")]
    pub struct MakeError {
        hosts: String,
        source: rcgen::Error,
    }

    /// An authority for one job, and what the processes of each role show; all in PEM. The authority's own key is not
    /// kept, so that no further certificate can be made.
    #[derive(Clone)]
    pub struct Certificates {
        /// The authority's certificate.
        pub authority: String,
        /// The certificate and key of the servers.
        pub server: Identity,
        /// The certificate and key of the trainers.
        pub trainer: Identity,
    }

    /// A certificate and its key, in PEM.
    #[derive(Clone)]
    pub struct Identity {
        /// The certificate.
        pub certificate: String,
        /// The key to it.
        pub key: String,
    }

    impl Certificates {
        /// Makes them anew, to hold for `life` from `now` on. `hosts` are further names of the servers, for clients
        /// that look for the host in a certificate.
        ///
        /// # Errors
        /// If a host cannot be a name.
        pub fn make(hosts: &[String], now: SystemTime, life: Duration) -> Result<Self, MakeError> {
            make(hosts, now, life).map_err(|source| MakeError { hosts: hosts.join(", "), source })
        }

        /// Returns what the processes of `role` show.
        #[must_use]
        pub const fn of(&self, role: Role) -> &Identity {
            match role {
                Role::Server => &self.server,
                Role::Trainer => &self.trainer,
            }
        }

        /// Returns name and text of each file in the folder of a process of `role`.
        #[must_use]
        pub fn files(&self, role: Role) -> [(&'static str, &str); 3] {
            let Identity { certificate, key } = self.of(role);
            [(AUTHORITY, &self.authority), (CERTIFICATE, certificate), (KEY, key)]
        }
    }

    fn make(hosts: &[String], now: SystemTime, life: Duration) -> Result<Certificates, rcgen::Error> {
        let begin = date_time_ymd(1970, 1, 1);
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let hold = |mut params: CertificateParams| {
            params.not_before = begin + now.saturating_sub(BEFORE);
            params.not_after = begin + now + life;
            params
        };
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.distinguished_name.push(DnType::CommonName, "psjobs job authority");
        let authority = CertifiedIssuer::self_signed(hold(authority), KeyPair::generate()?)?;
        let identity = |role, hosts: &[String]| -> Result<Identity, rcgen::Error> {
            let names = [&[NAME.to_owned(), role_name(role).to_owned()], hosts].concat();
            let mut process = CertificateParams::new(names)?;
            process.distinguished_name.push(DnType::CommonName, role_name(role));
            // One process is server to some and client to others.
            process.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate()?;
            let certificate = hold(process).signed_by(&key, &authority)?;
            Ok(Identity { certificate: certificate.pem(), key: key.serialize_pem() })
        };
        Ok(Certificates {
            authority: authority.pem(),
            server: identity(Role::Server, hosts)?,
            trainer: identity(Role::Trainer, &[])?,
        })
    }

    #[cfg(test)]
    mod tests {
        use super::super::LIFE;
        use super::*;

        #[test]
        fn certificates_are_pem_and_those_of_another_job_are_others() {
            let host = ["*.mnist.team.svc".to_owned()];
            let [one, other] = [(); 2].map(|()| Certificates::make(&host, UNIX_EPOCH, LIFE).expect("a name"));
            for role in [Role::Server, Role::Trainer] {
                for ((name, text), (_, others)) in one.files(role).into_iter().zip(other.files(role)) {
                    let what = if name == KEY { "PRIVATE KEY" } else { "CERTIFICATE" };
                    assert!(text.starts_with(&format!("-----BEGIN {what}-----\n")), "{role}: {name}: {text}");
                    assert_ne!(text, others, "{role}: {name}");
                }
            }
            assert_ne!(one.server.key, one.trainer.key, "a trainer has no key of a server");
            let error =
                Certificates::make(&["über".into()], UNIX_EPOCH, LIFE).map(drop).expect_err("no name of a host");
            assert!(error.to_string().contains("über"), "{error}");
        }
    }
}
