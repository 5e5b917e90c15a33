//! The kinds of jobs of the soak, and their manifests: examples of the repository, made small and slow. A job needs
//! little of a core, so that all kinds run at once on a small machine, and takes one to two minutes.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Container, PodTemplateSpec};
use psjobs_api::Role;
use psjobs_api::crd::{FailureAction, FailureRule, ParameterServerJob};
use serde_json::json;

use crate::cluster::image;
use crate::manifest::{from_file, main_container};

/// Steps of a trainer.
const STEPS: u64 = 450;
/// The least time that a trainer takes for an example, in milliseconds.
const EXAMPLE_MS: &str = "10";
/// Examples that a trainer reads in a step.
const BATCH: u32 = 16;
/// Trainers of each job.
const TRAINERS: u32 = 2;
/// Failures that the soak causes, by exit code and reason: a process is killed; a container is being started when its
/// kubelet is stopped. Every other one counts, and so does a process that needs too much memory.
const CAUSED: [(&str, i32, &str); 2] = [("killed", 137, "Error"), ("kubelet-stopped", 128, "StartError")];
/// Label of the nodes that run the API server, which take pods only of jobs that tolerate it.
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";

/// A kind of job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Sync, nothing held twice or kept.
    Sync,
    /// Async, the only kind without TLS.
    Async,
    /// Sync with 1 to 4 trainers.
    Elastic,
    /// Sync, every block held by both servers.
    Replicated,
    /// Sync on two servers with a checkpoint volume.
    Checkpointed,
    /// Sync with checkpoints in a small volume, which the schedule fills.
    FullDisk,
    /// Sync with sparse tables, held twice, and a checkpoint volume.
    Sparse,
    /// A network in the server, trained by remote calls.
    Remote,
}

/// The condition under which a disturbed job must end with the result of an undisturbed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// Two runs differ in any case.
    Never,
    /// While no server is lost: its successor begins with the optimizer's state anew.
    WithoutLostServers,
    /// While no trainer is lost. One that is lost in the middle of a step has given it to one server and not to the other,
    /// and its successor computes the rest from parameters of which some have the step.
    WithoutLostTrainers,
    /// Whatever is lost.
    Always,
}

impl Kind {
    pub const ALL: [Self; 8] = [
        Self::Sync,
        Self::Async,
        Self::Elastic,
        Self::Replicated,
        Self::Checkpointed,
        Self::FullDisk,
        Self::Sparse,
        Self::Remote,
    ];

    /// Returns the kind's name, which its jobs' names begin with.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Async => "async",
            Self::Elastic => "elastic",
            Self::Replicated => "replicated",
            Self::Checkpointed => "checkpointed",
            Self::FullDisk => "full-disk",
            Self::Sparse => "sparse",
            Self::Remote => "remote",
        }
    }

    /// Returns when a disturbed job must have the result of an undisturbed one.
    #[must_use]
    pub const fn repeats(self) -> Repeats {
        match self {
            Self::Sync => Repeats::WithoutLostServers,
            Self::Replicated | Self::Checkpointed | Self::Sparse => Repeats::WithoutLostTrainers,
            Self::FullDisk => Repeats::Always,
            Self::Async | Self::Elastic | Self::Remote => Repeats::Never,
        }
    }

    /// Returns true if the loss of one server costs no step, and that of both all that was not kept: nothing but the
    /// other server has the parameters.
    #[must_use]
    pub const fn lives_on_two_servers(self) -> bool {
        matches!(self, Self::Replicated)
    }

    /// Returns true if the servers keep checkpoints, and at the end the model.
    #[must_use]
    pub const fn keeps_the_model(self) -> bool {
        matches!(self, Self::Checkpointed | Self::FullDisk | Self::Sparse)
    }

    /// Returns how many processes of a role a job has.
    #[must_use]
    pub const fn replicas(self, role: Role) -> u32 {
        match (role, self) {
            (Role::Trainer, _) => TRAINERS,
            (Role::Server, Self::Replicated | Self::Checkpointed | Self::Sparse) => 2,
            (Role::Server, _) => 1,
        }
    }

    /// Returns the metrics that distinguish one model from another.
    #[must_use]
    pub const fn metrics(self) -> &'static [&'static str] {
        match self {
            Self::Sparse => &["auc", "log_loss"],
            Self::Remote => &["accuracy"],
            _ => &["accuracy", "test_loss"],
        }
    }

    /// Returns the manifest of the kind's job of this number.
    ///
    /// # Errors
    /// If the example cannot be read.
    pub fn job(self, number: u32) -> Result<ParameterServerJob> {
        let mut job = from_file(self.example())?;
        job.metadata.name = Some(format!("{}-{number}", self.name()));
        let spec = &mut job.spec;
        spec.training.batch.base = BATCH;
        spec.ps.replicas = self.replicas(Role::Server).cast_signed();
        spec.ps.template = Some(self.server()?);
        spec.trainer.replicas = TRAINERS.cast_signed();
        spec.run_policy.force_delete_after_seconds = 5;
        spec.failure_policy.rules.extend(CAUSED.map(|(name, code, reason)| FailureRule {
            name: name.into(),
            action: FailureAction::Ignore,
            count_towards_max: true,
            on_exit_codes: vec![code],
            on_reasons: vec![reason.into()],
            on_pod_conditions: Vec::new(),
            target_roles: Vec::new(),
        }));
        match self {
            Self::Async => spec.network.mutual_tls = false,
            Self::FullDisk => spec.ps.replicas = 1,
            Self::Sparse => spec.ps.replication_factor = 2,
            _ => {}
        }
        if self.keeps_the_model() {
            let claim = match self {
                Self::FullDisk => json!({"existingClaim": super::disk::CLAIM}),
                _ => json!({"volumeClaim": {"size": "1Gi"}}),
            };
            let mut checkpoint = claim;
            checkpoint["intervalSeconds"] = json!(5);
            spec.checkpoint = Some(serde_json::from_value(checkpoint)?);
        }
        let arguments = self.arguments();
        let trainer = main_container(&mut job)?;
        *trainer = Container { args: Some(arguments), ..container(&trainer.name)? };
        Ok(job)
    }

    const fn example(self) -> &'static str {
        match self {
            Self::Sync => "examples/mnist-sync.yaml",
            Self::Async => "examples/mnist.yaml",
            Self::Elastic => "examples/elastic.yaml",
            Self::Replicated => "examples/mnist-replicated.yaml",
            Self::Checkpointed | Self::FullDisk => "examples/mnist-checkpoint.yaml",
            Self::Sparse => "examples/recsys.yaml",
            Self::Remote => "examples/mnist-remote.yaml",
        }
    }

    fn arguments(self) -> Vec<String> {
        let line = match self {
            // The steps of all trainers.
            Self::Elastic => format!("train mlp --max-steps {} --example-ms {EXAMPLE_MS}", STEPS * u64::from(TRAINERS)),
            Self::Sparse => format!(
                "train recsys --keys 100000 --held-out 2000 --examples {} --example-ms {EXAMPLE_MS}",
                STEPS * u64::from(TRAINERS * BATCH)
            ),
            Self::Remote => format!("train mnist-remote --max-steps {STEPS}"),
            _ => format!("train mlp --max-steps {STEPS} --example-ms {EXAMPLE_MS}"),
        };
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn server(self) -> Result<PodTemplateSpec> {
        let container = Container { args: Some(vec!["serve".into()]), ..container("ps")? };
        let mut template = json!({"spec": {"containers": [container]}});
        if self == Self::FullDisk {
            template["spec"]["tolerations"] = json!([{"key": CONTROL_PLANE, "operator": "Exists"}]);
        }
        serde_json::from_value(template).context("the template of the servers is not one of pods")
    }
}

/// Returns the container of a server or trainer, without arguments: it asks for little, so that one node takes the pods
/// of all kinds.
fn container(name: &str) -> Result<Container> {
    let container = json!({
        "name": name,
        "image": image("psjobs-worker"),
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
    });
    serde_json::from_value(container).context("not a container")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_manifest() -> Result<()> {
        std::env::set_current_dir(crate::cluster::ROOT)?;
        for kind in Kind::ALL {
            let job = kind.job(7)?;
            assert_eq!(job.metadata.name, Some(format!("{}-7", kind.name())));
            assert_eq!(job.spec.checkpoint.is_some(), kind.keeps_the_model(), "{kind:?}");
            let twice = job.spec.ps.replication_factor == 2;
            assert_eq!(kind.lives_on_two_servers(), twice && !kind.keeps_the_model(), "{kind:?}");
            let sync = job.spec.training.consistency.mode == psjobs_api::training::ConsistencyMode::Sync;
            assert!(sync || kind.repeats() == Repeats::Never, "{kind:?}");
        }
        Ok(())
    }
}
