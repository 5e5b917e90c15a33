//! `psjobs certificates`: an authority for one job, and the certificate that its processes show.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use psjobs_ps::tls::NAME;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};

use crate::BadInput;

/// Make certificates for a job whose processes talk TLS
///
/// Writes ca.crt, tls.crt and tls.key. Give the folder to every process of the job, and to nobody else:
/// psjobs-worker serve --tls-dir DIR, psjobs-worker train ... --tls-dir DIR. The authority's own key is
/// not kept, so that nobody can make a further certificate.
#[derive(Debug, Args)]
pub struct CertificatesArgs {
    /// Folder to write to; it is made if it does not exist
    folder: PathBuf,
    /// Replace certificates that are there
    #[arg(long)]
    force: bool,
}

impl CertificatesArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { folder, force } = self;
        if !force && ["ca.crt", "tls.crt", "tls.key"].iter().any(|name| folder.join(name).exists()) {
            let folder = folder.display();
            return Err(BadInput::new(format!(
                "{folder} holds certificates already; name another one, or add --force"
            ))
            .into());
        }
        write(&folder)?;
        println!("wrote ca.crt, tls.crt and tls.key to {}", folder.display());
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes the certificates of a new authority to `folder`.
pub fn write(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.distinguished_name.push(DnType::CommonName, "psjobs job authority");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let mut process = CertificateParams::new([NAME.to_owned()])?;
    process.distinguished_name.push(DnType::CommonName, NAME);
    // One process is server to some and client to others.
    process.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate()?;
    let certificate = process.signed_by(&key, &authority)?;
    for (name, text, mode) in [
        ("ca.crt", authority.pem(), 0o644),
        ("tls.crt", certificate.pem(), 0o644),
        ("tls.key", key.serialize_pem(), 0o600),
    ] {
        let file = folder.join(name);
        // One that is replaced keeps no rights of its own.
        fs::remove_file(&file).ok();
        let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&file);
        let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}
