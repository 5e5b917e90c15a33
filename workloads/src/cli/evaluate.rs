//! `psjobs-worker serve evaluate WORKLOAD`: the workloads that server 0 can evaluate.

use clap::{Args, Subcommand};
use psjobs_api::ReplicaResult;
use psjobs_process::Failure;
use psjobs_process::serve::ServeArgs;
use psjobs_rpc::Registry;
use psjobs_worker::cli::evaluate::EvaluateArgs;

use super::train::digits::SetArgs;
use super::train::lm::ModelArgs;
use crate::model::convnet::ConvNet;
use crate::model::mlp::Mlp;

/// The workload that the trainers train. Arguments that shape the model are to be those of `train`.
#[derive(Clone, Debug, Args)]
pub struct Evaluated {
    #[command(subcommand)]
    workload: Known,
}

#[derive(Clone, Debug, Subcommand)]
enum Known {
    /// The accuracy of `train mnist`
    Mnist(Of<SetArgs>),
    /// The accuracy of `train mlp`
    Mlp(Of<SetArgs>),
    /// The perplexity of `train lm`, on text that it is not trained on
    Lm(Of<ModelArgs>),
}

#[derive(Clone, Debug, Args)]
struct Of<A: Args> {
    #[command(flatten)]
    workload: A,
    #[command(flatten)]
    evaluate: EvaluateArgs,
}

impl Evaluated {
    pub(super) fn run(&self, serve: &ServeArgs, registry: Registry) -> Result<ReplicaResult, Failure> {
        let args = Vec::new();
        match &self.workload {
            Known::Mnist(of) => of.evaluate.run(serve, registry, args, |source| of.workload.open(source, ConvNet::new)),
            Known::Mlp(of) => of.evaluate.run(serve, registry, args, |source| of.workload.open(source, Mlp::new)),
            Known::Lm(of) => of.evaluate.run(serve, registry, args, |source| of.workload.open(source)),
        }
    }
}
