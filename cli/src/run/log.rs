//! Copies the output of a process: all of it to a file, its last lines to memory for the case that it fails, and
//! whole lines to the terminal.

use std::collections::VecDeque;
use std::io::PipeReader;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use psjobs_api::Replica;
use tokio::fs::File;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// How many last lines are kept.
pub const TAIL_LINES: usize = 20;
/// The longest line that is kept whole.
const LINE_BYTES: usize = 2048;

/// Returns the log of a process in the folder `logs`, for all processes that are it one after the other.
pub fn log_file(logs: &Path, Replica { role, index }: Replica) -> PathBuf {
    logs.join(format!("{role}-{index}.log"))
}

/// Takes complete lines.
pub type Watcher = Arc<dyn Fn(&str) + Send + Sync>;

/// Cuts a stream of bytes into lines and keeps the last ones.
#[derive(Debug, Default)]
pub struct Lines {
    tail: VecDeque<String>,
    partial: Vec<u8>,
}

impl Lines {
    /// Takes more bytes; `watch` gets each line that they complete. A carriage return ends a line
    /// too, because progress bars write nothing else.
    pub fn push(&mut self, bytes: &[u8], mut watch: impl FnMut(&str)) {
        for &byte in bytes {
            match byte {
                b'\n' | b'\r' => self.complete(&mut watch),
                _ if self.partial.len() < LINE_BYTES => self.partial.push(byte),
                _ => {}
            }
        }
    }

    /// The last lines, a last one without an end among them.
    pub fn finish(mut self, mut watch: impl FnMut(&str)) -> Vec<String> {
        self.complete(&mut watch);
        self.tail.into()
    }

    fn complete(&mut self, watch: &mut impl FnMut(&str)) {
        let bytes = std::mem::take(&mut self.partial);
        let line = String::from_utf8_lossy(&bytes);
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        watch(line);
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.to_owned());
    }
}

/// How long output may still come after a process and its group are gone, from somebody who has left
/// the group and kept the pipe.
const LATE_OUTPUT: Duration = Duration::from_secs(1);

/// How much output is in a pipe at most (`pipe(7)`).
const PIPE_BYTES: usize = 64 * 1024;

/// Copies a process's output to the end of `file` until no process holds the pipe any more, and returns the
/// last lines. `ended` says that the process is gone. A file that cannot be written does not stop the
/// process: its lines are still watched.
pub async fn follow(
    output: PipeReader,
    file: &Path,
    watcher: Option<Watcher>,
    ended: oneshot::Receiver<()>,
) -> Vec<String> {
    let watch = |line: &str| watcher.iter().for_each(|watcher| watcher(line));
    let mut lines = Lines::default();
    let Ok(mut output) = Receiver::from_owned_fd(OwnedFd::from(output)) else { return Vec::new() };
    let mut file = File::options().append(true).create(true).open(file).await.ok();
    let mut buffer = vec![0; PIPE_BYTES];
    let mut late = pin!(async {
        ended.await.ok();
        sleep(LATE_OUTPUT).await;
    });
    let mut is_over = false;
    while !is_over {
        let read = tokio::select! {
            read = output.read(&mut buffer) => read.unwrap_or(0),
            // The pipe may still hold what the process wrote, if psjobs stood still.
            () = &mut late => {
                is_over = true;
                output.try_read(&mut buffer).unwrap_or(0)
            }
        };
        if read == 0 {
            break;
        }
        lines.push(&buffer[..read], watch);
        if let Some(open) = &mut file
            && open.write_all(&buffer[..read]).await.is_err()
        {
            file = None;
        }
    }
    if let Some(mut open) = file {
        // The last words are in `lines` in any case.
        open.flush().await.ok();
    }
    lines.finish(watch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_complete_bounded_and_the_last_ones_are_kept() {
        let mut watched = Vec::new();
        let mut lines = Lines::default();
        for part in ["one\ntw", "o\r\n\n  \n", "progress 1\rprogress 2\r", "no end"] {
            lines.push(part.as_bytes(), |line| watched.push(line.to_owned()));
        }
        let tail = lines.finish(|line| watched.push(line.to_owned()));
        assert_eq!(tail, ["one", "two", "progress 1", "progress 2", "no end"]);
        assert_eq!(watched, tail);

        let mut lines = Lines::default();
        (0..100).for_each(|n| lines.push(format!("{n}\n").as_bytes(), |_| {}));
        lines.push(&[b'x'; 10 * LINE_BYTES], |_| {});
        lines.push(&[0xff, b'\n'], |_| {});
        let tail = lines.finish(|_| {});
        assert_eq!((tail.len(), tail[0].as_str(), tail[19].len()), (TAIL_LINES, "81", LINE_BYTES));
    }
}
