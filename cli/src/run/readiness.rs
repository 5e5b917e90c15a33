//! Finds out when a server listens, as a pod's readiness probe does.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval};

/// A server starts within a fraction of a second, and its trainers wait for it.
const PERIOD: Duration = Duration::from_millis(20);

/// Waits until something accepts connections at `address`.
pub async fn wait(address: &str) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if TcpStream::connect(address).await.is_ok() {
            return;
        }
    }
}
