//! A language model in three pieces: the embedding table and the decoder are modules on a server, the
//! LSTM between them is one of the trainer. Autograd and the optimizer span all three.

use std::time::Duration;

use psjobs_api::training::Optimizer;
use psjobs_api::{Environment, ReplicaResult};
use tch::{Kind, Reduction, Tensor};

use psjobs_process::serve::IDLE_GPUS;
use psjobs_rpc::autograd::{Context, DistributedOptimizer, Module, ModuleRef, Parameters, Pass};
use psjobs_rpc::{Endpoint, Peer, Registry, RemoteError};
use psjobs_worker::Metrics;
use psjobs_worker::libtorch;
use psjobs_worker::train::Plan;
use psjobs_worker::train::modules::{ModulesError, Participant, RemoteStepClock};
use psjobs_worker::train::step_clock::Part;

const EMBEDDING: &str = "rnn-remote/embedding";
const DECODER: &str = "rnn-remote/decoder";
const DROPOUT: f64 = 0.5;
/// Weights of the embedding table and the decoder begin between minus and plus this.
const BOUND: f64 = 0.1;
/// Part of the text that is not trained on.
const HELD_OUT: f64 = 0.1;

/// Numbers of words `[t, b]` to vectors `[t, b, width]`.
struct Embedding;

impl Module for Embedding {
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let ([table], [words]) = (parameters, inputs) else {
            return Err(RemoteError::new(format!("expected the numbers of words, found {} tensors", inputs.len())));
        };
        Ok(vec![Tensor::f_embedding(table, words, -1, false, false)?.dropout(DROPOUT, pass.train())])
    }
}

/// Hidden states `[t, b, hidden]` and the words that follow, `[t, b]`, to the mean negative logarithm of
/// their probabilities. Scores of all words stay here: they are many times what comes in.
struct Decoder;

impl Module for Decoder {
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let ([bias, weight], [hidden, words]) = (parameters, inputs) else {
            return Err(RemoteError::new(format!("expected states and words, found {} tensors", inputs.len())));
        };
        let scores = hidden.dropout(DROPOUT, pass.train()).f_linear(weight, Some(bias))?;
        let scores = scores.flatten(0, 1).log_softmax(-1, Kind::Float);
        Ok(vec![scores.f_nll_loss::<Tensor>(&words.flatten(0, 1), None, Reduction::Mean, -100)?])
    }
}

/// Vectors, a hidden and a cell state `[layers, b, hidden]` to hidden states of every step, and both states
/// after the last.
struct Lstm {
    layers: i64,
}

impl Module for Lstm {
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let [vectors, hidden, cell] = inputs else {
            return Err(RemoteError::new(format!("expected vectors and two states, found {} tensors", inputs.len())));
        };
        let parameters: Vec<&Tensor> = parameters.iter().collect();
        let (states, hidden, cell) =
            vectors.f_lstm(&[hidden, cell], &parameters, true, self.layers, 0.0, pass.train(), false, false)?;
        Ok(vec![states, hidden, cell])
    }
}

fn uniform(shape: &[i64], bound: f64) -> Tensor {
    Tensor::empty(shape, tch::kind::FLOAT_CPU).uniform_(-bound, bound)
}

/// As libtorch has them: for each layer the weights of input and state, then both biases.
fn lstm_parameters(size: &Size) -> Parameters {
    let bound = 1.0 / (size.hidden as f64).sqrt();
    let gates = 4 * size.hidden;
    (0..size.layers).fold(Parameters::new(), |parameters, layer| {
        let inputs = if layer == 0 { size.width } else { size.hidden };
        parameters
            .with(format!("weight_ih_l{layer}"), uniform(&[gates, inputs], bound))
            .with(format!("weight_hh_l{layer}"), uniform(&[gates, size.hidden], bound))
            .with(format!("bias_ih_l{layer}"), uniform(&[gates], bound))
            .with(format!("bias_hh_l{layer}"), uniform(&[gates], bound))
    })
}

/// Offers the embedding table and the decoder, which are on the CPU of a server without GPUs. Their arguments: a seed, and the
/// two sizes of their weight.
pub fn offer(registry: &mut Registry, gpus: u32) {
    registry.module(EMBEDDING, move |_, arguments: (i64, i64, i64)| {
        let [words, width] = begin(arguments, gpus)?;
        Ok((Embedding, Parameters::new().with("weight", uniform(&[words, width], BOUND))))
    });
    registry.module(DECODER, move |_, arguments: (i64, i64, i64)| {
        let [words, hidden] = begin(arguments, gpus)?;
        let bias = Tensor::zeros([words], tch::kind::FLOAT_CPU);
        Ok((Decoder, Parameters::new().with("bias", bias).with("weight", uniform(&[words, hidden], BOUND))))
    });
}

fn begin((seed, rows, columns): (i64, i64, i64), gpus: u32) -> Result<[i64; 2], RemoteError> {
    if gpus > 0 {
        return Err(RemoteError::new(IDLE_GPUS));
    }
    if rows < 1 || columns < 1 {
        return Err(RemoteError::new(format!("a weight of {rows} x {columns} cannot be")));
    }
    libtorch::load().map_err(|error| RemoteError::new(error.to_string()))?;
    tch::manual_seed(seed);
    Ok([rows, columns])
}

/// Sizes of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Words of the vocabulary.
    pub words: i64,
    /// Numbers in a word's vector.
    pub width: i64,
    /// Numbers in a state of the LSTM.
    pub hidden: i64,
    pub layers: i64,
}

/// The model from the trainer's point of view.
#[derive(Debug)]
pub struct Rnn {
    endpoint: Endpoint,
    size: Size,
    pub embedding: ModuleRef,
    pub lstm: ModuleRef,
    pub decoder: ModuleRef,
    optimizer: DistributedOptimizer,
}

/// Hidden and cell state.
pub type States = [Tensor; 2];

impl Rnn {
    /// Makes the pieces, here and at `server`, and the optimizer of all.
    ///
    /// # Errors
    /// If a call failed.
    pub fn new(
        endpoint: &Endpoint,
        server: &Peer,
        size: Size,
        seed: i64,
        optimizer: &Optimizer,
    ) -> Result<Self, RemoteError> {
        let embedding = ModuleRef::new(server.remote(EMBEDDING, (seed, size.words, size.width))?);
        let decoder = ModuleRef::new(server.remote(DECODER, (seed + 1, size.words, size.hidden))?);
        tch::manual_seed(seed + 2);
        let lstm = endpoint.module(Lstm { layers: size.layers }, lstm_parameters(&size));
        let mut parameters = Vec::new();
        for module in [&embedding, &lstm, &decoder] {
            parameters.extend(module.parameter_rrefs()?);
        }
        let optimizer = DistributedOptimizer::new(endpoint, &parameters, optimizer)?;
        Ok(Self { endpoint: endpoint.clone(), size, embedding, lstm, decoder, optimizer })
    }

    /// The states before the first word of `batch` texts.
    pub fn first_states(&self, batch: i64) -> States {
        let Size { layers, hidden, .. } = self.size;
        [(); 2].map(|()| Tensor::zeros([layers, batch, hidden], tch::kind::FLOAT_CPU))
    }

    /// One step of the optimizer by the loss of `next` after `words`, both `[t, b]`. Gradients do not go
    /// back beyond `states`, which then are those after the last word. `clock` is notified when forward ends.
    ///
    /// # Errors
    /// If a call failed.
    pub fn step(
        &self,
        words: &Tensor,
        next: &Tensor,
        states: &mut States,
        clock: &mut RemoteStepClock,
    ) -> Result<f64, RemoteError> {
        let context = Context::new(&self.endpoint);
        let vectors = context.forward(&self.embedding, &[words])?.swap_remove(0);
        let mut out = context.forward(&self.lstm, &[&vectors, &states[0], &states[1]])?;
        let loss = context.forward(&self.decoder, &[&out[0], next])?.swap_remove(0);
        clock.end(Part::Forward);
        context.backward(&[&loss])?;
        self.optimizer.step(&context)?;
        *states = [out.remove(1).detach(), out.remove(1).detach()];
        Ok(loss.double_value(&[]))
    }

    /// The loss alone, without dropout.
    ///
    /// # Errors
    /// If a call failed.
    pub fn evaluate(&self, words: &Tensor, next: &Tensor, states: &mut States) -> Result<f64, RemoteError> {
        let vectors = self.embedding.evaluate(&[words])?.swap_remove(0);
        let mut out = self.lstm.evaluate(&[&vectors, &states[0], &states[1]])?;
        let loss = self.decoder.evaluate(&[&out[0], next])?.swap_remove(0);
        *states = [out.remove(1), out.remove(1)];
        Ok(loss.double_value(&[]))
    }
}

/// A text in `b` columns, read side by side from the top, `[n, b]`.
#[derive(Debug)]
pub struct Columns(Tensor);

impl Columns {
    /// Words that do not fill a row are left out; `None` if there are not two rows.
    #[must_use]
    pub fn new(words: &[i64], batch: usize) -> Option<Self> {
        let rows = words.len() / batch.max(1);
        let used = words.get(..rows * batch).filter(|_| rows >= 2)?;
        Some(Self(Tensor::from_slice(used).view([batch as i64, rows as i64]).transpose(0, 1).contiguous()))
    }

    /// Steps of `length` words in one pass.
    #[must_use]
    pub fn steps(&self, length: i64) -> i64 {
        (self.0.size()[0] - 1) / length
    }

    /// The words of a step and those that follow them, each `[length, b]`.
    pub fn window(&self, step: i64, length: i64) -> (Tensor, Tensor) {
        (self.0.narrow(0, step * length, length), self.0.narrow(0, step * length + 1, length))
    }
}

/// The settings of the trainer.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: Plan,
    pub size: Size,
    /// Words in one step.
    pub length: i64,
    pub optimizer: Optimizer,
    /// How long to wait for a server.
    pub connect_timeout: Duration,
}

/// Trains on `words`, all but the end. `None` if `stop` said so.
///
/// # Errors
/// See [`ModulesError`].
pub fn train(
    environment: &Environment,
    words: &[i64],
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, ModulesError> {
    let Settings { plan, size, length, optimizer, connect_timeout } = settings;
    let unfit = |text: String| ModulesError::Connect(RemoteError::new(text));
    if environment.trainers > 1 {
        return Err(unfit("the LSTM lives on the trainer: spec.trainer.replicas must be 1".into()));
    }
    let (training, held_out) = words.split_at(words.len() - (words.len() as f64 * HELD_OUT) as usize);
    let [training, held_out] = [training, held_out].map(|part| Columns::new(part, plan.batch));
    let (Some(training), Some(held_out)) = (training, held_out) else {
        return Err(unfit(format!("the text has {} words, too few for --batch-size {}", words.len(), plan.batch)));
    };
    let (per_epoch, last_steps) = (training.steps(*length), held_out.steps(*length));
    if per_epoch == 0 || last_steps == 0 {
        return Err(unfit(format!("the text has {} words, too few for steps of {length}", words.len())));
    }
    let total = plan.total_steps(per_epoch.unsigned_abs());
    let participant = Participant::join(environment, Registry::default(), Vec::new(), total, *connect_timeout)?;
    let seed = plan.seed as i64;
    participant.attend(|participant| {
        let model = Rnn::new(participant.endpoint(), &participant.servers()[0], *size, seed, optimizer);
        let model = model.map_err(ModulesError::Connect)?;
        ready();
        let first = || model.first_states(plan.batch as i64);
        let mut states = first();
        let mut result = participant.train(plan, total, stop, |number, clock| {
            let step = number as i64 % per_epoch;
            if step == 0 {
                states = first();
            }
            let (words, next) = training.window(step, *length);
            clock.end(Part::Data);
            model.step(&words, &next, &mut states, clock)
        })?;
        if let Some(result) = &mut result {
            let loss = mean_loss(&model, &held_out, *length, first()).map_err(ModulesError::Evaluate)?;
            result.metrics.extend(Metrics::from([("perplexity".into(), loss.exp()), ("test_loss".into(), loss)]));
        }
        Ok(result)
    })
}

fn mean_loss(model: &Rnn, text: &Columns, length: i64, mut states: States) -> Result<f64, RemoteError> {
    let steps = text.steps(length);
    let mut sum = 0.0;
    for step in 0..steps {
        let (words, next) = text.window(step, length);
        sum += model.evaluate(&words, &next, &mut states)?;
    }
    Ok(sum / steps as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_of_a_server_leave_no_gpu_idle() {
        assert_eq!(begin((1, 5, 3), 0), Ok([5, 3]));
        assert_eq!(begin((1, 5, 3), 1), Err(RemoteError::new(IDLE_GPUS)));
    }

    #[test]
    fn columns_go_on_from_step_to_step() {
        let words: Vec<i64> = (0..23).collect();
        let columns = Columns::new(&words, 3).expect("seven rows");
        assert_eq!(columns.steps(2), 3);
        let text = |tensor: Tensor| Vec::<Vec<i64>>::try_from(tensor).expect("2-d");
        let (read, next) = columns.window(0, 2);
        assert_eq!(
            (text(read), text(next)),
            (vec![vec![0, 7, 14], vec![1, 8, 15]], vec![vec![1, 8, 15], vec![2, 9, 16]])
        );
        assert_eq!(text(columns.window(2, 2).1), [[5, 12, 19], [6, 13, 20]]);
        assert!(Columns::new(&words, 12).is_none());
        assert!(Columns::new(&[], 0).is_none());
    }
}
