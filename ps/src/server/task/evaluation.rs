//! Has the model measured while it trains: server 0 reads the parameters from all servers, hands them to whoever
//! started it, and tells the metrics that come back. What is computed with them is not this crate's matter.

use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior};

use crate::clock::now;
use crate::server::config::{Evaluation, Measurement};
use crate::server::state::ServerState;

/// Measures as time passes, unless nothing was trained since the last time. Ends when nobody measures any more.
pub async fn run(state: &ServerState, evaluation: Evaluation) {
    state.model_known().await;
    let Ok(layout) = state.store().map(|store| store.layout().clone()) else { return };
    let Evaluation { every, reading, measurements, .. } = evaluation;
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    // A measurement that takes longer than the period leaves as long a pause after it.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut measured = 0;
    loop {
        ticks.tick().await;
        let mut parameters = vec![0.0; layout.elements()];
        let updates = match reading.read(&state.config.network, &layout, &mut parameters).await {
            Ok(updates) => updates,
            Err(status) => {
                let reason = status.message();
                tracing::warn!(reason, "the parameters cannot be read, so they are not evaluated now");
                continue;
            }
        };
        if updates == measured {
            continue;
        }
        let step = state.members().result().steps;
        let (reply, metrics) = oneshot::channel();
        if measurements.send(Measurement { parameters, reply }).await.is_err() {
            return;
        }
        let Ok(metrics) = metrics.await else {
            tracing::error!("the model is not evaluated any more; training goes on");
            return;
        };
        let shown: Vec<String> = metrics.iter().map(|(name, value)| format!("{name}={value:.4}")).collect();
        tracing::info!(step, metrics = shown.join(" "), "evaluated");
        state.members().evaluated(metrics, now());
        measured = updates;
    }
}
