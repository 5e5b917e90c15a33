//! Evaluates the model during training: reads the parameters from all servers, sends them to the program that runs this
//! server, and reports the metrics that it returns.

use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior};

use crate::clock::now;
use crate::server::config::{Evaluation, Measurement};
use crate::server::state::ServerState;

/// Requests an evaluation at every interval in which the model has changed. Ends when the receiver is dropped.
pub async fn run(state: &ServerState, evaluation: Evaluation) {
    state.model_known().await;
    let Ok(layout) = state.store().map(|store| store.layout().clone()) else { return };
    let Evaluation { every, reading, measurements, .. } = evaluation;
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    // An evaluation that takes longer than the interval delays the next one by a whole interval.
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
