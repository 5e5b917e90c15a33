//! A client that reads what `logs` reads, and does nothing with it.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::server::{Server, log_path};
use crate::speech::PODS;

/// Reads the logs of all pods, over a connection each, in one thread as the program does; returns the time it takes.
pub fn seconds(server: &Server) -> Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let address = server.address;
    let begin = Instant::now();
    let bytes = runtime.block_on(async {
        let reads: Vec<_> = (0..PODS).map(|pod| tokio::spawn(read(address, pod))).collect();
        let mut bytes = 0;
        for read in reads {
            bytes += read.await??;
        }
        anyhow::Ok(bytes)
    })?;
    let taken = begin.elapsed().as_secs_f64();
    ensure!(bytes == server.bytes(), "the plain client read {bytes} bytes of {}", server.bytes());
    Ok(taken)
}

async fn read(address: SocketAddr, pod: usize) -> Result<usize> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n", log_path(pod));
    stream.write_all(request.as_bytes()).await?;
    let mut buffer = vec![0; 1 << 16];
    let mut bytes = 0;
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(bytes),
            read => bytes += read,
        }
    }
}
