//! `psjobs-worker train WORKLOAD`: one subcommand for each workload; its flags are in the file of its name.

mod cartpole;
pub(super) mod digits;
pub(super) mod lm;
mod mnist_remote;
mod recsys;
mod remote;
mod rnn_remote;
mod torchscript;

use clap::{Args, Subcommand};
use psjobs_api::ReplicaResult;
use psjobs_process::Failure;

use crate::model::convnet::ConvNet;
use crate::model::mlp::Mlp;

/// Arguments of `train`.
#[derive(Clone, Debug, Args)]
pub struct TrainCommand {
    #[command(subcommand)]
    workload: WorkloadCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum WorkloadCommand {
    /// A convolutional network on MNIST or Fashion-MNIST, 1.2 million parameters
    Mnist(digits::DigitsArgs),
    /// A perceptron with one hidden layer, 784-256-10, on MNIST or Fashion-MNIST
    Mlp(digits::DigitsArgs),
    /// A language model (embedding, LSTM) on the words of any text, 9.3 million parameters
    Lm(lm::LmArgs),
    /// A module exported from Python, on images or on examples from a CSV or safetensors file or a folder
    Torchscript(torchscript::TorchScriptArgs),
    /// The convolutional network on MNIST, living on a server as a remote module; its gradients are
    /// looked at every --log-every steps
    MnistRemote(mnist_remote::MnistRemoteArgs),
    /// Balancing a pole by reinforcement learning: trainer 0 is the agent, the others observe
    #[command(name = "cartpole")]
    CartPole(cartpole::CartPoleArgs),
    /// A language model in three pieces: embedding and decoder on a server, the LSTM here; a batch is
    /// texts read side by side
    RnnRemote(rnn_remote::RnnRemoteArgs),
    /// Predicting clicks: a table of vectors by key on the servers, the dense layers by all-reduce between the
    /// trainers
    Recsys(recsys::RecsysArgs),
}

/// Trains, and returns what this trainer did.
///
/// # Errors
/// See [`Failure`].
pub fn run(command: &TrainCommand) -> Result<ReplicaResult, Failure> {
    match &command.workload {
        WorkloadCommand::Mnist(args) => args.run(ConvNet::new),
        WorkloadCommand::Mlp(args) => args.run(Mlp::new),
        WorkloadCommand::Lm(args) => args.run(),
        WorkloadCommand::Torchscript(args) => args.run(),
        WorkloadCommand::MnistRemote(args) => args.run(),
        WorkloadCommand::CartPole(args) => args.run(),
        WorkloadCommand::RnnRemote(args) => args.run(),
        WorkloadCommand::Recsys(args) => args.run(),
    }
}
