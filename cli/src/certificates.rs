//! `psjobs certificates`: an authority for one job, and the certificates that its servers and its trainers show.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use clap::Args;
use psjobs_api::Role;
use psjobs_api::certificates::{Certificates, KEY};

use crate::bad_input::BadInput;

/// How long they hold: ten years, because they are not renewed.
const LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The roles that have a folder, servers first.
const ROLES: [Role; 2] = [Role::Server, Role::Trainer];

/// Make certificates for a job whose processes talk TLS
///
/// Writes ca.crt, tls.crt and tls.key to DIR/ps and to DIR/trainer. Give the first folder to the servers of the job, the
/// second to its trainers, and neither to others: psjobs-worker serve --tls-dir DIR/ps, psjobs-worker train ... --tls-dir
/// DIR/trainer. A trainer's certificate does not let a process pass for a server. The authority's own key is not kept, so
/// that no further certificate can be made. They hold for ten years.
#[derive(Debug, Args)]
pub struct CertificatesArgs {
    /// Folder to write to; it is made if it does not exist
    folder: PathBuf,
    /// Replace certificates that are there
    #[arg(long)]
    force: bool,
}

impl CertificatesArgs {
    pub fn run(self) -> anyhow::Result<u8> {
        let Self { folder, force } = self;
        if !force && ROLES.iter().any(|role| folder.join(role.as_str()).exists()) {
            let folder = folder.display();
            return Err(BadInput::new(format!(
                "{folder} holds certificates already; name another one, or add --force"
            ))
            .into());
        }
        write(&folder)?;
        let [servers, trainers] = ROLES.map(|role| folder.join(role.as_str()).display().to_string());
        // A reader that has gone away wants no report.
        let report = format!("wrote ca.crt, tls.crt and tls.key for servers to {servers}, for trainers to {trainers}");
        writeln!(std::io::stdout(), "{report}").ok();
        Ok(0)
    }
}

/// Writes the certificates of a new authority to `folder`: a folder for each role, `ps` and `trainer`.
pub fn write(folder: &Path) -> anyhow::Result<()> {
    let certificates = Certificates::make(&[], SystemTime::now(), LIFE)?;
    for role in ROLES {
        let folder = folder.join(role.as_str());
        fs::create_dir_all(&folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
        for (name, text) in certificates.files(role) {
            let mode = if name == KEY { 0o600 } else { 0o644 };
            let file = folder.join(name);
            // One that is replaced keeps no rights of its own.
            fs::remove_file(&file).ok();
            let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&file);
            let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
            written.with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    Ok(())
}
