//! The model in three pieces loses what the same net loses in one process. The test is alone in its
//! binary: dropout draws from the one generator of the process.

mod job;

use std::time::Duration;

use job::Job;
use psjobs_api::Training;
use psjobs_api::training::Optimizer;
use psjobs_rpc::Registry;
use psjobs_worker::train::modules::{Participant, RemoteStepClock};
use psjobs_workloads::workload::rnn_remote::{Columns, Rnn, Size};
use tch::{COptimizer, Kind, Tensor};

const SIZE: Size = Size { words: 60, width: 12, hidden: 16, layers: 2 };
const BATCH: i64 = 4;
const LENGTH: i64 = 7;
const STEPS: i64 = 50;
const LEARNING_RATE: f64 = 0.05;

#[test]
fn fifty_steps_lose_what_one_process_loses() {
    // A text with something to learn: each word follows from the two before it.
    let mut words = vec![1_i64, 2];
    while words.len() < 2000 {
        words.push((words[words.len() - 1] * 3 + words[words.len() - 2] + words.len() as i64 % 5) % SIZE.words);
    }
    let text = Columns::new(&words, BATCH as usize).expect("long enough");
    assert!(text.steps(LENGTH) >= STEPS);

    let job = Job::start(1, 1, Training::default());
    let timeout = Duration::from_secs(20);
    let participant =
        Participant::join(&job.trainer(0), Registry::default(), Vec::new(), STEPS as u64, timeout).expect("it is up");
    let optimizer = Optimizer { learning_rate: LEARNING_RATE, ..Optimizer::default() };
    let model = Rnn::new(participant.endpoint(), &participant.servers()[0], SIZE, 5, &optimizer).expect("made");
    let own = |tensors: Vec<Tensor>| tensors.into_iter().map(|t| t.copy().set_requires_grad(true)).collect::<Vec<_>>();
    let first = [&model.embedding, &model.lstm, &model.decoder].map(|m| own(m.parameters().expect("known")));

    tch::manual_seed(9);
    let mut states = model.first_states(BATCH);
    let mut clock = RemoteStepClock::start();
    let split: Vec<f64> = (0..STEPS)
        .map(|step| {
            let (words, next) = text.window(step, LENGTH);
            model.step(&words, &next, &mut states, &mut clock).expect("a step")
        })
        .collect();
    tch::manual_seed(9);
    let whole = in_one_process(&text, &first);
    for (step, (split, whole)) in split.iter().zip(&whole).enumerate() {
        assert!((split - whole).abs() < 1e-5, "step {step}: {split} in three pieces, {whole} in one process");
    }
    assert!(whole[STEPS as usize - 1] < whole[0], "it learns");
    drop(model);
    participant.leave(Some(&Default::default())).expect("it listens");
    job.join();
}

/// Trains the net with libtorch's own optimizer, in this process.
fn in_one_process(text: &Columns, [embedding, lstm, decoder]: &[Vec<Tensor>; 3]) -> Vec<f64> {
    let mut optimizer = COptimizer::sgd(LEARNING_RATE, 0.0, 0.0, 0.0, false).expect("usable");
    for tensor in [embedding, lstm, decoder].into_iter().flatten() {
        optimizer.add_parameters(tensor, 0).expect("trainable");
    }
    let zeros = || Tensor::zeros([SIZE.layers, BATCH, SIZE.hidden], tch::kind::FLOAT_CPU);
    let (mut hidden, mut cell) = (zeros(), zeros());
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (words, next) = text.window(step, LENGTH);
        let vectors = Tensor::embedding(&embedding[0], &words, -1, false, false).dropout(0.5, true);
        let parameters: Vec<&Tensor> = lstm.iter().collect();
        let (states, h, c) = vectors.lstm(&[&hidden, &cell], &parameters, true, SIZE.layers, 0.0, true, false, false);
        let scores = states.dropout(0.5, true).linear(&decoder[1], Some(&decoder[0]));
        let loss = scores.view([-1, SIZE.words]).log_softmax(-1, Kind::Float).nll_loss(&next.reshape([-1]));
        optimizer.zero_grad().expect("trainable");
        loss.backward();
        optimizer.step().expect("trainable");
        (hidden, cell) = (h.detach(), c.detach());
        losses.push(loss.double_value(&[]));
    }
    losses
}
