//! Counts the bytes that a server's connections carry, with all headers of HTTP/2 and TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use psjobs_api::result::Traffic;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// The bytes of all connections of a server.
#[derive(Debug, Default)]
pub struct Counter {
    received: AtomicU64,
    sent: AtomicU64,
}

impl Counter {
    /// Returns the bytes so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic { received: self.received.load(Relaxed), sent: self.sent.load(Relaxed) }
    }
}

/// A connection whose bytes are counted.
pub struct Counted<S> {
    stream: S,
    counter: Arc<Counter>,
}

impl<S> Counted<S> {
    /// Counts the bytes of `stream`, too.
    pub fn new(stream: S, counter: Arc<Counter>) -> Self {
        Self { stream, counter }
    }

    fn sent(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.counter.sent.fetch_add(*bytes as u64, Relaxed);
        }
        written
    }
}

impl<S: Connected> Connected for Counted<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> S::ConnectInfo {
        self.stream.connect_info()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.counter.received.fetch_add((buffer.filled().len() - before) as u64, Relaxed);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.sent(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.sent(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn each_connection_adds_what_it_carries_in_its_direction() {
        let counter = Arc::<Counter>::default();
        for _ in 0..2 {
            let (ours, mut theirs) = duplex(64);
            let mut ours = Counted::new(ours, counter.clone());
            theirs.write_all(b"gradients").await.expect("room");
            ours.read_exact(&mut [0; 9]).await.expect("they are there");
            ours.write_all(b"values").await.expect("room");
            drop(theirs);
            assert_eq!(ours.read(&mut [0; 9]).await.expect("a good end"), 0);
            ours.write_all(b"more").await.expect_err("it is closed");
        }
        assert_eq!(counter.traffic(), Traffic { received: 18, sent: 12 });
    }
}
