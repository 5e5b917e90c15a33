//! Has the model measured while it trains: server 0 reads the parameters from all servers, hands them to whoever
//! started it, and tells the metrics that come back. What is computed with them is not this crate's matter.

use std::collections::BTreeMap;
use std::time::Duration;

use psjobs_api::Environment;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::shared::Shared;
use crate::client::Reading;
use crate::clock::now;
use crate::layout::TensorSpec;

/// How often, and of which model, the parameters are measured.
#[derive(Debug)]
pub struct Evaluation {
    tensors: Vec<TensorSpec>,
    every: Duration,
    reading: Reading,
    measurements: mpsc::Sender<Measurement>,
}

/// Parameters to measure.
#[derive(Debug)]
pub struct Measurement {
    /// The whole flat space.
    pub parameters: Vec<f32>,
    /// Takes the metrics by name.
    pub reply: oneshot::Sender<BTreeMap<String, f64>>,
}

impl Evaluation {
    /// Of a model of these tensors, in the job of `environment`; the receiver gets the parameters `every` so often.
    /// It is closed when the server ends.
    #[must_use]
    pub fn new(
        environment: &Environment,
        tensors: Vec<TensorSpec>,
        every: Duration,
    ) -> (Self, mpsc::Receiver<Measurement>) {
        // The next one is read when the last one is measured.
        let (measurements, receiver) = mpsc::channel(1);
        (Self { tensors, every, reading: Reading::new(environment), measurements }, receiver)
    }

    /// The tensors of the model, in the order of the flat space.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }
}

/// Measures as time passes, unless nothing was trained since the last time. Ends when nobody measures any more.
pub async fn run(shared: &Shared, evaluation: Evaluation) {
    shared.model_known().await;
    let Ok(layout) = shared.store().map(|store| store.layout().clone()) else { return };
    let Evaluation { every, reading, measurements, .. } = evaluation;
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    // A measurement that takes longer than the period leaves as long a pause after it.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut measured = 0;
    loop {
        ticks.tick().await;
        let mut parameters = vec![0.0; layout.elements()];
        let updates = match reading.read(&shared.config.network, &layout, &mut parameters).await {
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
        let step = shared.members().result().steps;
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
        shared.members().evaluated(metrics, now());
        measured = updates;
    }
}
