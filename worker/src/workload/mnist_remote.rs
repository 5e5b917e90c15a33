//! MNIST with the network on a server: trainers send images, get log-probabilities, and take the loss
//! backwards through a context. The network may be split over two devices of its server.

use std::time::Duration;

use psjobs_api::training::Optimizer;
use psjobs_api::{Environment, ReplicaResult};
use tch::{Cuda, Device, Kind, Tensor, nn};

use super::Metrics;
use crate::data::mnist::Mnist;
use crate::data::sampler::Split;
use crate::libtorch;
use crate::model::convnet::ConvNet;
use crate::remote::autograd::{Context, DistributedOptimizer, Module, ModuleRef, Parameters, Pass};
use crate::remote::{Registry, RemoteError};
use crate::train::Plan;
use crate::train::modules::{ModulesError, Participant};

/// Name of the network in a server's registry.
pub const CONVNET: &str = "mnist-remote/convnet";

/// Images in one call of the evaluation, as in [`super::digits`].
const EVALUATION_BATCH: usize = 32;

/// [`ConvNet`] as a function of its parameters, sorted by name. What comes after the second convolution
/// is on the second device.
#[derive(Debug)]
struct SplitConvNet {
    devices: [Device; 2],
}

impl SplitConvNet {
    /// The network with the values that [`ConvNet`] draws for this seed.
    fn new(seed: i64, devices: [Device; 2]) -> (Self, Parameters) {
        // On the CPU, whose generator gives the same values everywhere.
        let store = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(seed);
        let _ = ConvNet::new(&store.root());
        let mut variables: Vec<_> = store.variables().into_iter().collect();
        variables.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let parameters = variables.into_iter().fold(Parameters::new(), |parameters, (name, tensor)| {
            let device = devices[usize::from(!name.starts_with("conv"))];
            parameters.with(name, tensor.detach().to_device(device))
        });
        (Self { devices }, parameters)
    }
}

impl Module for SplitConvNet {
    /// Images `[b, 1, 28, 28]` to log-probabilities `[b, 10]`; dropout only in a context.
    fn forward(&self, pass: &Pass<'_>, parameters: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>, RemoteError> {
        let [bias1, conv1, bias2, conv2, fc1_bias, fc1, fc2_bias, fc2] = parameters else {
            return Err(RemoteError::new(format!("the network has 8 parameters, not {}", parameters.len())));
        };
        let [images] = inputs else {
            return Err(RemoteError::new(format!("expected one tensor of images, found {} tensors", inputs.len())));
        };
        if !matches!(images.size()[..], [_, 1, 28, 28]) {
            return Err(RemoteError::new(format!("expected images [n, 1, 28, 28], found {:?}", images.size())));
        }
        let [first, second] = self.devices;
        let conv = |x: &Tensor, weight, bias| x.conv2d(weight, Some(bias), [1, 1], [0, 0], [1, 1], 1);
        let features = conv(&images.to_device(first), conv1, bias1).relu();
        let features = conv(&features, conv2, bias2).to_device(second).max_pool2d_default(2);
        let features = features.dropout(0.25, pass.train()).flatten(1, -1);
        let hidden = features.linear(fc1, Some(fc1_bias)).relu().dropout(0.5, pass.train());
        Ok(vec![hidden.linear(fc2, Some(fc2_bias)).log_softmax(-1, Kind::Float)])
    }
}

/// Offers the network. Its arguments: the seed, and the number of CUDA devices to use.
pub fn offer(registry: &mut Registry) {
    registry.module(CONVNET, |call, (seed, num_gpus): (i64, Option<i64>)| {
        libtorch::load().map_err(|error| RemoteError::new(error.to_string()))?;
        let devices = devices(num_gpus, Cuda::device_count()).ok_or_else(|| {
            let (asked, found) = (num_gpus.unwrap_or(0), Cuda::device_count());
            RemoteError::new(format!(
                "--num-gpus is {asked}, but {} sees {found} CUDA devices; lower it, or give the server more",
                call.endpoint.name()
            ))
        })?;
        tracing::info!(devices = ?devices, seed, "hosting the network");
        Ok(SplitConvNet::new(seed, devices))
    });
}

/// The devices of both halves, of a server that sees `visible`; `None` if that is fewer than asked for.
fn devices(num_gpus: Option<i64>, visible: i64) -> Option<[Device; 2]> {
    match num_gpus.unwrap_or_else(|| visible.clamp(0, 2)) {
        0 => Some([Device::Cpu; 2]),
        1 if visible >= 1 => Some([Device::Cuda(0); 2]),
        2 if visible >= 2 => Some([Device::Cuda(0), Device::Cuda(1)]),
        _ => None,
    }
}

/// What a trainer is told.
#[derive(Clone, Debug)]
pub struct Settings {
    pub plan: Plan,
    pub optimizer: Optimizer,
    /// CUDA devices of the server; those that it has, up to two, if not given.
    pub num_gpus: Option<u32>,
    /// How long to wait for a server.
    pub patience: Duration,
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
    let mut sampler = split.sampler(plan.trainer)?;
    let participant = Participant::join(environment, Registry::default(), Vec::new(), total, settings.patience)?;
    let trainer = Trainer::new(&participant, settings).map_err(ModulesError::Connect)?;
    ready();
    let step = |number| {
        let (images, labels) = data.train.select(sampler.batch(number));
        trainer.step(&images, &labels, number % plan.log_every == 0)
    };
    let mut result = participant.train(plan, total, stop, step)?;
    if let Some(result) = result.as_mut().filter(|_| plan.trainer == 0) {
        result.metrics.extend(trainer.evaluate(data).map_err(ModulesError::Evaluate)?);
    }
    drop(trainer);
    participant.leave(result.as_ref())?;
    Ok(result)
}

/// The network from a trainer's point of view.
struct Trainer<'a> {
    participant: &'a Participant,
    network: ModuleRef,
    optimizer: DistributedOptimizer,
}

impl<'a> Trainer<'a> {
    fn new(participant: &'a Participant, settings: &Settings) -> Result<Self, RemoteError> {
        let seed = i64::try_from(settings.plan.seed).unwrap_or(i64::MAX);
        // The first trainer makes it, the others find it.
        let network = participant.servers()[0].singleton(CONVNET, (seed, settings.num_gpus.map(i64::from)))?;
        let network = ModuleRef::new(network);
        let parameters = network.parameter_rrefs()?;
        let optimizer = DistributedOptimizer::new(participant.endpoint(), &parameters, &settings.optimizer)?;
        Ok(Self { participant, network, optimizer })
    }

    /// One step; fetches the gradients and looks at them if `check`.
    fn step(&self, images: &Tensor, labels: &Tensor, check: bool) -> Result<f64, RemoteError> {
        let context = Context::new(self.participant.endpoint());
        let output = context.forward(&self.network, &[images])?.swap_remove(0);
        let loss = output.nll_loss(labels);
        context.backward(&[&loss])?;
        if check {
            present(&context.gradients(&self.network)?)?;
        }
        self.optimizer.step(&context)?;
        Ok(loss.double_value(&[]))
    }

    /// `accuracy` and `test_loss`, by the network's newest parameters.
    fn evaluate(&self, data: &Mnist) -> Result<Metrics, RemoteError> {
        let (mut right, mut loss) = (0.0, 0.0);
        for (images, labels) in data.test.batches(EVALUATION_BATCH) {
            let output = self.network.evaluate(&[&images])?.swap_remove(0);
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
        let rows = [
            (None, 0, Some(cpu)),
            (None, 1, Some(one)),
            (None, 8, Some(two)),
            (Some(0), 8, Some(cpu)),
            (Some(1), 8, Some(one)),
            (Some(2), 2, Some(two)),
            (Some(1), 0, None),
            (Some(2), 1, None),
            (Some(3), 8, None),
            (Some(-1), 8, None),
        ];
        for (num_gpus, visible, want) in rows {
            assert_eq!(devices(num_gpus, visible), want, "{num_gpus:?} of {visible}");
        }
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
