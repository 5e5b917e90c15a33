//! MNIST with the network on the servers: trainers send images, get log-probabilities, and take the loss
//! backwards through a context. The network may be split over two devices of a server, and over several servers.

use std::ops::Range;
use std::time::Duration;

use psjobs_api::training::Optimizer;
use psjobs_api::{Environment, ReplicaResult};
use tch::{Cuda, Device, Kind, Tensor, nn};

use crate::data::mnist::Mnist;
use crate::model::convnet::ConvNet;
use psjobs_rpc::autograd::{Context, DistributedOptimizer, Module, ModuleRef, ParameterRef, Parameters, Pass};
use psjobs_rpc::{Peer, Registry, RemoteError};
use psjobs_worker::Metrics;
use psjobs_worker::data::loader::Loader;
use psjobs_worker::data::sampler::Split;
use psjobs_worker::libtorch;
use psjobs_worker::train::Plan;
use psjobs_worker::train::modules::{ModulesError, Participant, RemoteStepClock};
use psjobs_worker::train::step_clock::Part;

/// Name of the network in a server's registry.
pub const CONVNET: &str = "mnist-remote/convnet";

/// Images in one call of the evaluation, as in [`super::digits`].
const EVALUATION_BATCH: usize = 32;

/// The layers with parameters, in order, and the shape of one example that goes into each.
const LAYERS: [(&str, &[i64]); 4] =
    [("conv1", &[1, 28, 28]), ("conv2", &[32, 26, 26]), ("fc1", &[9216]), ("fc2", &[128])];

/// Consecutive layers of [`ConvNet`] as a function of their parameters, sorted by name. What comes after the second
/// convolution is on the second device.
#[derive(Debug)]
struct Piece {
    layers: Range<usize>,
    devices: [Device; 2],
}

/// The layers of piece `index` of `count`.
fn share(index: usize, count: usize) -> Range<usize> {
    index * LAYERS.len() / count..(index + 1) * LAYERS.len() / count
}

impl Piece {
    /// These layers with the values that [`ConvNet`] draws for this seed.
    fn new(seed: i64, layers: Range<usize>, devices: [Device; 2]) -> (Self, Parameters) {
        // On the CPU, whose generator gives the same values everywhere.
        let store = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(seed);
        let _ = ConvNet::new(&store.root());
        let mut variables: Vec<_> = store.variables().into_iter().collect();
        variables.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let here = |name: &str| LAYERS[layers.clone()].iter().any(|(layer, _)| name.starts_with(layer));
        variables.retain(|(name, _)| here(name));
        let parameters = variables.into_iter().fold(Parameters::new(), |parameters, (name, tensor)| {
            let device = devices[usize::from(!name.starts_with("conv"))];
            parameters.with(name, tensor.detach().to_device(device))
        });
        (Self { layers, devices }, parameters)
    }

    fn layer(&self, layer: usize, x: &Tensor, weight: &Tensor, bias: &Tensor, train: bool) -> Tensor {
        let [first, second] = self.devices;
        let conv = |x: &Tensor| x.conv2d(weight, Some(bias), [1, 1], [0, 0], [1, 1], 1);
        let linear = |x: &Tensor| x.to_device(second).linear(weight, Some(bias));
        match layer {
            0 => conv(&x.to_device(first)).relu(),
            1 => {
                let features = conv(&x.to_device(first)).to_device(second).max_pool2d_default(2);
                features.dropout(0.25, train).flatten(1, -1)
            }
            2 => linear(x).relu().dropout(0.5, train),
            _ => linear(x).log_softmax(-1, Kind::Float),
        }
    }
}

impl Module for Piece {
    /// Images `[b, 1, 28, 28]`, or what the piece before gives, to log-probabilities `[b, 10]`, or what the next piece
    /// takes; dropout only in a context.
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let (pairs, []) = parameters.as_chunks::<2>() else {
            return Err(RemoteError::new(format!("every layer has 2 parameters, found {} in all", parameters.len())));
        };
        let [input] = inputs else {
            return Err(RemoteError::new(format!("expected one tensor, found {} tensors", inputs.len())));
        };
        let (name, want) = LAYERS[self.layers.start];
        if input.dim() == 0 || input.size()[1..] != *want {
            let (found, rest) = (input.size(), want.iter().map(i64::to_string).collect::<Vec<_>>().join(", "));
            return Err(RemoteError::new(format!("{name} takes [n, {rest}], found {found:?}")));
        }
        let layers = self.layers.clone().zip(pairs);
        let output = layers.fold(input.shallow_clone(), |x, (layer, [bias, weight])| {
            self.layer(layer, &x, weight, bias, pass.train())
        });
        Ok(vec![output])
    }
}

/// Offers the network, on a server that was given so many GPUs. Its arguments: the seed, the number of CUDA devices to use, and
/// which piece of how many.
pub fn offer(registry: &mut Registry, gpus: u32) {
    registry.module(CONVNET, move |call, (seed, num_gpus, piece, pieces): (i64, Option<i64>, i64, i64)| {
        libtorch::load().map_err(|error| RemoteError::new(error.to_string()))?;
        let devices = devices(num_gpus, Cuda::device_count(), gpus)
            .map_err(|why| RemoteError::new(format!("{} {why}", call.endpoint.name())))?;
        if !(0..pieces).contains(&piece) || pieces > LAYERS.len() as i64 {
            let most = LAYERS.len();
            return Err(RemoteError::new(format!(
                "there is no piece {piece} of {pieces}; the network has at most {most}"
            )));
        }
        let layers = share(piece as usize, pieces as usize);
        let names: Vec<_> = LAYERS[layers.clone()].iter().map(|(name, _)| *name).collect();
        tracing::info!(devices = ?devices, seed, layers = names.join(","), "hosting the network");
        Ok(Piece::new(seed, layers, devices))
    });
}

/// The network from a trainer's point of view: pieces of it, one behind the other, on as many servers.
#[derive(Debug)]
pub struct Network {
    pieces: Vec<ModuleRef>,
}

impl Network {
    /// Finds the network on these servers; the first trainer makes it. Servers beyond the number of layers have none.
    ///
    /// # Errors
    /// If a call failed.
    pub fn on(servers: &[Peer], seed: i64, num_gpus: Option<i64>) -> Result<Self, RemoteError> {
        let count = servers.len().min(LAYERS.len());
        let piece = |(server, index): (&Peer, i64)| {
            server.singleton(CONVNET, (seed, num_gpus, index, count as i64)).map(ModuleRef::new)
        };
        let pieces = servers[..count].iter().zip(0..).map(piece).collect::<Result<_, _>>()?;
        Ok(Self { pieces })
    }

    /// From the first layer to the last.
    #[must_use]
    pub fn pieces(&self) -> &[ModuleRef] {
        &self.pieces
    }

    /// References to all parameters.
    ///
    /// # Errors
    /// If a call failed.
    pub fn parameter_rrefs(&self) -> Result<Vec<ParameterRef>, RemoteError> {
        let parameters: Vec<_> = self.pieces.iter().map(ModuleRef::parameter_rrefs).collect::<Result<_, _>>()?;
        Ok(parameters.into_iter().flatten().collect())
    }

    /// Log-probabilities of images `[b, 1, 28, 28]`, recorded in `context`.
    ///
    /// # Errors
    /// If a call failed.
    pub fn forward(&self, context: &Context, images: &Tensor) -> Result<Tensor, RemoteError> {
        self.pieces
            .iter()
            .try_fold(images.shallow_clone(), |x, piece| Ok(context.forward(piece, &[&x])?.swap_remove(0)))
    }

    /// Computes the scores without dropout, by the newest parameters.
    ///
    /// # Errors
    /// If a call failed.
    pub fn evaluate(&self, images: &Tensor) -> Result<Tensor, RemoteError> {
        self.pieces.iter().try_fold(images.shallow_clone(), |x, piece| Ok(piece.evaluate(&[&x])?.swap_remove(0)))
    }
}

/// The devices of both halves, of a server that sees `visible` and was `given` some of them; else what it has or lacks, and what
/// to change.
fn devices(num_gpus: Option<i64>, visible: i64, given: u32) -> Result<[Device; 2], String> {
    if num_gpus.is_none() && given > 2 && visible > 2 {
        return Err(format!(
            "was given {given} GPUs (a limit in spec.ps.template), but computes on two; lower the limit, or say by \
             --num-gpus how many to use"
        ));
    }
    match num_gpus.unwrap_or_else(|| visible.clamp(0, 2)) {
        0 => Ok([Device::Cpu; 2]),
        1 if visible >= 1 => Ok([Device::Cuda(0); 2]),
        2 if visible >= 2 => Ok([Device::Cuda(0), Device::Cuda(1)]),
        asked => {
            Err(format!("sees {visible} CUDA devices, and --num-gpus is {asked}; lower it, or give the server more"))
        }
    }
}

/// The settings of a trainer.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: Plan,
    pub optimizer: Optimizer,
    /// CUDA devices of the server; those that it has, up to two, if not given.
    pub num_gpus: Option<u32>,
    /// How long to wait for a server.
    pub connect_timeout: Duration,
}

/// Trains the one network of the job together with the other trainers. `None` if `stop` said so.
///
/// # Errors
/// See [`ModulesError`].
pub fn train(
    environment: &Environment,
    data: &Mnist,
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, ModulesError> {
    let plan = &settings.plan;
    let split = Split { examples: data.train.len(), batch: plan.batch, trainers: plan.trainers, seed: plan.seed };
    let total = plan.total_steps(split.steps_per_epoch()?);
    let sampler = split.sampler(plan.trainer)?;
    let participant = Participant::join(environment, Registry::default(), Vec::new(), total, settings.connect_timeout)?;
    participant.attend(|participant| {
        let trainer = Trainer::new(participant, settings).map_err(ModulesError::Connect)?;
        ready();
        let mut batches = Loader::start(data.train.clone(), sampler, 0..total);
        let step = |number, clock: &mut RemoteStepClock| {
            let (images, labels) = batches.next_batch().map_err(|ended| RemoteError::new(ended.to_string()))?;
            clock.end(Part::Data);
            trainer.step(&images, &labels, number % plan.log_every == 0, clock)
        };
        let mut result = participant.train(plan, total, stop, step)?;
        if let Some(result) = result.as_mut().filter(|_| plan.trainer == 0) {
            result.metrics.extend(trainer.evaluate(data).map_err(ModulesError::Evaluate)?);
        }
        Ok(result)
    })
}

/// One trainer at the network.
struct Trainer<'a> {
    participant: &'a Participant,
    network: Network,
    optimizer: DistributedOptimizer,
}

impl<'a> Trainer<'a> {
    fn new(participant: &'a Participant, settings: &Settings) -> Result<Self, RemoteError> {
        let seed = i64::try_from(settings.plan.seed).unwrap_or(i64::MAX);
        let network = Network::on(participant.servers(), seed, settings.num_gpus.map(i64::from))?;
        let parameters = network.parameter_rrefs()?;
        let optimizer = DistributedOptimizer::new(participant.endpoint(), &parameters, &settings.optimizer)?;
        Ok(Self { participant, network, optimizer })
    }

    /// One step; fetches the gradients and looks at them if `check`.
    fn step(
        &self,
        images: &Tensor,
        labels: &Tensor,
        check: bool,
        clock: &mut RemoteStepClock,
    ) -> Result<f64, RemoteError> {
        let context = Context::new(self.participant.endpoint());
        let loss = self.network.forward(&context, images)?.nll_loss(labels);
        clock.end(Part::Forward);
        context.backward(&[&loss])?;
        for piece in self.network.pieces().iter().filter(|_| check) {
            present(&context.gradients(piece)?)?;
        }
        self.optimizer.step(&context)?;
        Ok(loss.double_value(&[]))
    }

    /// `accuracy` and `test_loss`, by the network's newest parameters.
    fn evaluate(&self, data: &Mnist) -> Result<Metrics, RemoteError> {
        let (mut right, mut loss) = (0.0, 0.0);
        for (images, labels) in data.test.batches(EVALUATION_BATCH) {
            let output = self.network.evaluate(&images)?;
            right += output.argmax(-1, false).eq_tensor(&labels).sum(Kind::Float).double_value(&[]);
            loss += output.nll_loss(&labels).double_value(&[]) * labels.numel() as f64;
        }
        let count = data.test.len() as f64;
        Ok(Metrics::from([("accuracy".to_owned(), right / count), ("test_loss".to_owned(), loss / count)]))
    }
}

/// Refuses gradients of which one is missing: a piece of the network took no part.
fn present(gradients: &[Option<Tensor>]) -> Result<(), RemoteError> {
    match gradients.iter().position(Option::is_none) {
        None if !gradients.is_empty() => Ok(()),
        None => Err(RemoteError::new("the context has no gradients for the network")),
        Some(place) => Err(RemoteError::new(format!("the context has no gradient for parameter {place}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_follow_from_the_flag_and_the_server() {
        let (cpu, one, two) = ([Device::Cpu; 2], [Device::Cuda(0); 2], [Device::Cuda(0), Device::Cuda(1)]);
        let (more, idle) = ("give the server more", "lower the limit");
        let rows = [
            (None, 0, 0, Ok(cpu)),
            (None, 1, 1, Ok(one)),
            (None, 8, 0, Ok(two)),
            (None, 2, 2, Ok(two)),
            (None, 2, 4, Ok(two)),
            (None, 4, 4, Err(idle)),
            (Some(2), 4, 4, Ok(two)),
            (Some(0), 8, 8, Ok(cpu)),
            (Some(1), 8, 0, Ok(one)),
            (Some(2), 2, 0, Ok(two)),
            (Some(1), 0, 0, Err(more)),
            (Some(2), 1, 1, Err(more)),
            (Some(3), 8, 0, Err(more)),
            (Some(-1), 8, 0, Err(more)),
        ];
        for (num_gpus, visible, given, want) in rows {
            let found = devices(num_gpus, visible, given);
            let is_right = match (&found, want) {
                (Ok(found), Ok(want)) => *found == want,
                (Err(why), Err(want)) => why.contains(want),
                _ => false,
            };
            assert!(is_right, "{num_gpus:?} of {visible}, {given} given: {found:?}, expected {want:?}");
        }
    }

    #[test]
    fn every_layer_is_in_one_piece() {
        for (pieces, want) in [(1, vec![4]), (2, vec![2, 2]), (3, vec![1, 1, 2]), (4, vec![1; 4])] {
            let shares: Vec<_> = (0..pieces).map(|piece| share(piece, pieces)).collect();
            assert_eq!(shares.iter().map(Range::len).collect::<Vec<_>>(), want);
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
        }
    }

    #[test]
    fn a_piece_names_what_it_takes() {
        let (piece, parameters) = Piece::new(1, share(1, 2), [Device::Cpu; 2]);
        let images = Tensor::zeros([3, 1, 28, 28], tch::kind::FLOAT_CPU);
        let error = piece.forward(&Pass::new(None), parameters.tensors(), &[images]).expect_err("for the first piece");
        assert!(error.to_string().contains("fc1 takes [n, 9216], found [3, 1, 28, 28]"), "{error}");
        let features = Tensor::zeros([3, 9216], tch::kind::FLOAT_CPU);
        let output = piece.forward(&Pass::new(None), parameters.tensors(), &[features]).expect("it fits");
        assert_eq!(output[0].size(), [3, 10]);
    }

    #[test]
    fn a_gradient_that_is_missing_is_named() {
        let some = || Some(Tensor::zeros([1], tch::kind::FLOAT_CPU));
        assert_eq!(present(&[some(), some()]), Ok(()));
        assert!(present(&[]).is_err());
        let error = present(&[some(), None]).expect_err("one is missing").to_string();
        assert!(error.contains("parameter 1"), "{error}");
    }
}
