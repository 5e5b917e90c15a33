//! How long a server waits for the state of its part of a checkpoint, and for the disk that the part goes to.

use std::time::Duration;

use super::error::RecoveryError;
use super::extent::extent;
use crate::checkpoint::BlockState;
use crate::server::state::ServerState;
use crate::sparse::ShardState;

/// Timeout for writing a part, beside the time for its bytes.
const WRITE: Duration = Duration::from_secs(120);
/// Bytes that a disk or a store takes in a second, at least.
const BYTES_PER_SECOND: u64 = 10_000_000;
/// Timeout for layers that trainers train themselves, after the rows of their step.
const LAYERS: Duration = Duration::from_secs(120);

/// Waits for the `copies` of the state at `version`. Its step may be far off; its layers come a moment after its rows, or not
/// at all if trainer 0 is away.
///
/// # Errors
/// If the layers do not come.
pub(super) async fn with_layers<T>(
    state: &ServerState,
    version: u64,
    copies: impl Future<Output = T>,
) -> Result<T, RecoveryError> {
    let is_made = async || extent(state).await.is_some_and(|now| now.steps >= version);
    tokio::pin!(copies);
    let mut was_made = is_made().await;
    loop {
        match tokio::time::timeout(LAYERS, &mut copies).await {
            Ok(copies) => return Ok(copies),
            Err(_) if was_made => return Err(RecoveryError::NoLayers(version)),
            Err(_) => was_made = is_made().await,
        }
    }
}

/// Returns the bytes of these blocks and rows.
pub(super) fn bytes_of(blocks: &[BlockState], rows: &[ShardState]) -> u64 {
    let numbers = |block: &BlockState| {
        block.values.len() + block.slots.iter().map(Vec::len).sum::<usize>() + block.previous.len()
    };
    let of_blocks = (blocks.iter().map(numbers).sum::<usize>() * size_of::<f32>()) as u64;
    of_blocks + rows.iter().map(ShardState::bytes).sum::<u64>()
}

/// Returns how long a part of so many bytes may take to be written.
pub(super) fn time_to_write(bytes: u64) -> Duration {
    WRITE + Duration::from_secs(bytes / BYTES_PER_SECOND)
}

/// Waits for work on a part, no longer than its `limit`. The work goes on.
///
/// # Errors
/// If it takes longer.
pub(super) async fn in_time<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T, RecoveryError> {
    tokio::time::timeout(limit, work).await.map_err(|_| RecoveryError::Slow { limit })
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tonic::{Code, Status};

    use super::*;

    #[test]
    fn a_part_has_more_time_the_more_bytes_it_has() {
        for (bytes, seconds) in [(0, 120), (9_999_999, 120), (20_000_000_000, 2120)] {
            assert_eq!(time_to_write(bytes), Duration::from_secs(seconds), "{bytes} bytes");
        }
        let (values, slots) = (vec![0.0; 500_000], vec![vec![0.0; 500_000]; 2]);
        let block = BlockState { values, slots, ..BlockState::default() };
        assert_eq!(time_to_write(bytes_of(&[block.clone(), block], &[])), Duration::from_secs(121), "12 MB");
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_takes_too_long_is_a_fault_of_the_disk() {
        let fault = in_time(time_to_write(0), pending::<()>()).await.expect_err("it never ends");
        let status = Status::from(fault);
        assert_eq!(status.code(), Code::DeadlineExceeded);
        assert!(status.message().contains("within 120 s"), "{status:?}");
    }
}
