//! Certificates of the processes of a job for TLS: files with the names that a Kubernetes TLS secret gives them.
//! [`Certificates`], behind the `certificates` feature, makes them; the operator for a job, `psjobs certificates` by
//! hand.

use std::time::Duration;

/// How long the certificates hold that the operator makes for a job, and renews.
pub const LIFE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The name in every certificate of a job. It is the authority that tells jobs apart, not the host: pods come and
/// go, and their addresses with them.
pub const NAME: &str = "psjob";
/// File of the authority's certificate.
pub const AUTHORITY: &str = "ca.crt";
/// File of the processes' certificate.
pub const CERTIFICATE: &str = "tls.crt";
/// File of the key to it.
pub const KEY: &str = "tls.key";

#[cfg(feature = "certificates")]
pub use make::{Certificates, MakeError};

#[cfg(feature = "certificates")]
mod make {
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
        date_time_ymd,
    };

    use super::{AUTHORITY, CERTIFICATE, KEY, NAME};

    /// Certificates hold from so long ago on, as clocks of machines differ.
    const BEFORE: Duration = Duration::from_secs(24 * 60 * 60);

    /// No certificates could be made.
    #[derive(Debug, thiserror::Error)]
    #[error("cannot make certificates for {hosts}; names of hosts are made of ASCII letters, digits, dots and dashes")]
    pub struct MakeError {
        hosts: String,
        source: rcgen::Error,
    }

    /// An authority for one job, and the certificate that its processes show; all in PEM. The authority's own key is
    /// not kept, so that no further certificate can be made.
    #[derive(Clone)]
    pub struct Certificates {
        /// The authority's certificate.
        pub authority: String,
        /// The processes' certificate.
        pub certificate: String,
        /// The key to it.
        pub key: String,
    }

    impl Certificates {
        /// Makes them anew, to hold for `life` from `now` on. `hosts` are further names of the processes, for clients
        /// that look for the host in a certificate.
        ///
        /// # Errors
        /// If a host cannot be a name.
        pub fn make(hosts: &[String], now: SystemTime, life: Duration) -> Result<Self, MakeError> {
            make(hosts, now, life).map_err(|source| MakeError { hosts: hosts.join(", "), source })
        }

        /// Name and text of each file.
        #[must_use]
        pub fn files(&self) -> [(&'static str, &str); 3] {
            [(AUTHORITY, &self.authority), (CERTIFICATE, &self.certificate), (KEY, &self.key)]
        }
    }

    fn make(hosts: &[String], now: SystemTime, life: Duration) -> Result<Certificates, rcgen::Error> {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.distinguished_name.push(DnType::CommonName, "psjobs job authority");
        let mut process = CertificateParams::new([&[NAME.to_owned()], hosts].concat())?;
        process.distinguished_name.push(DnType::CommonName, NAME);
        // One process is server to some and client to others.
        process.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let begin = date_time_ymd(1970, 1, 1);
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        for params in [&mut authority, &mut process] {
            params.not_before = begin + now.saturating_sub(BEFORE);
            params.not_after = begin + now + life;
        }
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let certificate = process.signed_by(&key, &authority)?;
        Ok(Certificates { authority: authority.pem(), certificate: certificate.pem(), key: key.serialize_pem() })
    }

    #[cfg(test)]
    mod tests {
        use super::super::LIFE;
        use super::*;

        #[test]
        fn certificates_are_pem_and_those_of_another_job_are_others() {
            let host = ["*.mnist.team.svc".to_owned()];
            let [one, other] = [(); 2].map(|()| Certificates::make(&host, UNIX_EPOCH, LIFE).expect("a name"));
            for ((name, text), (_, others)) in one.files().into_iter().zip(other.files()) {
                let what = if name == KEY { "PRIVATE KEY" } else { "CERTIFICATE" };
                assert!(text.starts_with(&format!("-----BEGIN {what}-----\n")), "{name}: {text}");
                assert_ne!(text, others, "{name}");
            }
            let error =
                Certificates::make(&["über".into()], UNIX_EPOCH, LIFE).map(drop).expect_err("no name of a host");
            assert!(error.to_string().contains("über"), "{error}");
        }
    }
}
