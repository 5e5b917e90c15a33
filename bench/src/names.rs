//! Names of servers, which lead elsewhere when a server is replaced, as those of a cluster's DNS do. Connections that exist
//! stay where they are.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use psjobs_ps::network::{self, Dial, Dialing, Stream};
use tokio::net::TcpStream;

/// A folder with a file for each name, which holds the address. All processes of a job read it.
#[derive(Clone, Debug)]
pub struct Names(PathBuf);

impl Names {
    /// Reads the names from `folder`.
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// Makes `name` lead to `address` from now on.
    ///
    /// # Errors
    /// If the folder cannot be written to.
    pub fn lead(&self, name: &str, address: &str) -> anyhow::Result<()> {
        let next = self.0.join("next");
        // Renamed, so that no process reads half an address.
        let written = fs::write(&next, address).and_then(|()| fs::rename(&next, self.0.join(name)));
        written.with_context(|| format!("cannot write the address of {name} to {}", self.0.display()))
    }
}

impl Dial for Names {
    fn dial(&self, name: &str) -> Dialing {
        let address = fs::read_to_string(self.0.join(name));
        Box::pin(async move {
            let stream = TcpStream::connect(address?).await?;
            network::prepare(&stream);
            Ok(Box::new(stream) as Box<dyn Stream>)
        })
    }
}
