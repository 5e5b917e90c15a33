//! Tells work that goes on from work that stands still.

use std::time::Duration;

use tokio::sync::watch;

/// Resolves when `limit` has passed without a sign of progress. Never, if nobody is left to give one.
pub async fn standstill(mut signs: watch::Receiver<()>, limit: Duration) {
    while let Ok(sign) = tokio::time::timeout(limit, signs.changed()).await {
        if sign.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_stands_still_while_somebody_is_to_give_a_sign_and_gives_none() {
        let (signs, seen) = watch::channel(());
        signs.send_replace(());
        standstill(seen.clone(), Duration::from_millis(1)).await;
        drop(signs);
        let never = standstill(seen, Duration::from_millis(1));
        tokio::time::timeout(Duration::from_millis(50), never).await.expect_err("nobody is left");
    }
}
