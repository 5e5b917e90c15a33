//! One end of a simulated connection, as the transports of client and server take it.

use std::future::{Future as _, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use psjobs_ps::network::{Dial, Dialing, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

use super::network::{Found, Host, Id, Network};

/// One end.
pub struct End {
    network: Network,
    id: Id,
    side: usize,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl End {
    pub fn new(network: &Network, id: Id, side: usize) -> Self {
        Self { network: network.clone(), id, side, sleep: None }
    }
}

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let found = this.network.wires().read(this.id, this.side, buffer.remaining(), cx.waker());
            match found {
                Found::Bytes(bytes) => {
                    buffer.put_slice(&bytes);
                    return Poll::Ready(Ok(()));
                }
                Found::End => return Poll::Ready(Ok(())),
                Found::Reset => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                Found::Nothing => return Poll::Pending,
                Found::Later(at) => {
                    let sleep = this.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
                    sleep.as_mut().reset(at);
                    ready!(sleep.as_mut().poll(cx));
                }
            }
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.network.wires().write(self.id, self.side, bytes, cx.waker())
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.network.wires().finish(self.id, self.side, false);
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.network.wires().finish(self.id, self.side, true);
    }
}

impl Connected for End {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

/// The dialer of a process on `from`.
pub struct Dialer {
    pub network: Network,
    pub from: Host,
}

impl Dial for Dialer {
    fn dial(&self, address: &str) -> Dialing {
        let (network, from, address) = (self.network.clone(), self.from, address.to_owned());
        Box::pin(async move {
            let round_trip = network.wires().round_trip(from, &address);
            tokio::time::sleep(round_trip).await;
            poll_fn(|cx| network.wires().reach(from, &address, cx.waker())).await;
            let end = network.connect(from, &address)?;
            Ok(Box::new(end) as Box<dyn Stream>)
        })
    }
}
