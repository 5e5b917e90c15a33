//! `psjobs certificates`: an authority for one job, and the certificate that its processes show.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use clap::Args;
use psjobs_api::certificates::{AUTHORITY, CERTIFICATE, Certificates, KEY};

use crate::bad_input::BadInput;

/// How long they hold: ten years, because they are not renewed.
const LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Make certificates for a job whose processes talk TLS
///
/// Writes ca.crt, tls.crt and tls.key. Give the folder to every process of the job, and to no other:
/// psjobs-worker serve --tls-dir DIR, psjobs-worker train ... --tls-dir DIR. The authority's own key is
/// not kept, so that no further certificate can be made. They hold for ten years.
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
        if !force && [AUTHORITY, CERTIFICATE, KEY].iter().any(|name| folder.join(name).exists()) {
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
    for (name, text) in Certificates::make(&[], SystemTime::now(), LIFE)?.files() {
        let mode = if name == KEY { 0o600 } else { 0o644 };
        let file = folder.join(name);
        // One that is replaced keeps no rights of its own.
        fs::remove_file(&file).ok();
        let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&file);
        let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}
