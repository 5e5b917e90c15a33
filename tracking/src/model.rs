//! The trained model, on its way from the disk to the tracking server.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use psjobs_ps::checkpoint::Folder;
use psjobs_ps::checkpoint::disk::OpenFile;
use tokio::sync::{mpsc, watch};

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;
/// Pieces that wait to be sent.
const WAITING: usize = 4;
/// Bytes a second that an upload has to make on average, beside the time that it has in any case.
const SLOWEST: u64 = 4 << 20;

/// Returns the path below the root of all artefacts of the file `name` of a run whose artefacts are at `artifact_uri`, if the
/// tracking server passes them on: else clients write to the place themselves, with credentials of their own.
pub fn path_of(artifact_uri: &str, name: &str) -> Option<String> {
    let path = artifact_uri.strip_prefix("mlflow-artifacts:/")?;
    // Two slashes begin the name of another server.
    let path = path.strip_prefix("//").unwrap_or(path);
    (!path.is_empty() && !path.starts_with('/')).then(|| format!("{}/{name}", path.trim_end_matches('/')))
}

/// Returns the time for the upload of so many bytes.
pub fn limit(bytes: u64) -> Duration {
    Duration::from_secs(30 + bytes / SLOWEST)
}

/// The contents of a file, as the body of a request.
#[derive(Debug)]
pub struct FileBody {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    left: u64,
    /// Gets a sign for each piece that is taken, until all are.
    signs: Option<watch::Sender<()>>,
}

impl FileBody {
    /// Begins to read a file. Returns its length, too, and what gets a sign for each piece that is taken.
    ///
    /// # Errors
    /// If it cannot be opened. Waits for the disk.
    pub fn open(folder: &Folder, name: &str) -> io::Result<(Self, u64, watch::Receiver<()>)> {
        let path: &Path = &folder.join(name);
        let file = folder.disk().open(path)?;
        let bytes = file.bytes()?;
        let (sender, pieces) = mpsc::channel(WAITING);
        std::thread::Builder::new().name("psjobs-model".to_owned()).spawn(move || read(&*file, bytes, &sender))?;
        let (signs, seen) = watch::channel(());
        Ok((Self { pieces, left: bytes, signs: Some(signs) }, bytes, seen))
    }
}

/// Gives `sender` the first `bytes` of a file, until nobody takes them.
fn read(file: &dyn OpenFile, bytes: u64, sender: &mpsc::Sender<io::Result<Bytes>>) {
    let mut offset = 0;
    while offset < bytes {
        let mut piece = vec![0; PIECE.min(bytes - offset) as usize];
        let piece = file.read_at(&mut piece, offset).map(|()| Bytes::from(piece));
        let is_over = piece.is_err();
        if sender.blocking_send(piece).is_err() || is_over {
            return;
        }
        offset += PIECE;
    }
}

impl http_body::Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let body = self.get_mut();
        body.pieces.poll_recv(context).map(|piece| {
            let piece = piece?;
            body.left = body.left.saturating_sub(piece.as_ref().map_or(0, |piece| piece.len() as u64));
            if body.left == 0 {
                // The server may take its time with the whole, which it passes on.
                body.signs = None;
            } else if let Some(signs) = &body.signs {
                signs.send_replace(());
            }
            Some(piece.map(Frame::data))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        // With a length the request says so, and servers know when all is there.
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artefacts_go_through_the_server_or_nowhere() {
        for (uri, path) in [
            ("mlflow-artifacts:/1/a2/artifacts", Some("1/a2/artifacts/model.safetensors")),
            ("mlflow-artifacts:///1/a2/artifacts/", Some("1/a2/artifacts/model.safetensors")),
            ("mlflow-artifacts://other:5000/1/a2/artifacts", None),
            ("mlflow-artifacts:/", None),
            ("s3://bucket/1/a2/artifacts", None),
            ("file:///mlruns/1/a2/artifacts", None),
            ("/mlruns/1/a2/artifacts", None),
        ] {
            assert_eq!(path_of(uri, "model.safetensors").as_deref(), path, "{uri}");
        }
        assert_eq!(limit(8 << 20), Duration::from_secs(32));
    }
}
