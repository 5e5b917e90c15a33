//! The result of a job: the metrics that its trainers measured with the trained model, with all digits, and the checksum
//! of the model where the servers have kept it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::Api;
use psjobs_api::crd::{ParameterServerJobStatus, names};

use super::disk;
use super::kind::Kind;
use crate::command::run;
use crate::namespace::TestNamespace;
use crate::wait::until_ok;

/// The result of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelResult {
    metrics: BTreeMap<String, f64>,
    /// SHA-256 of the exported model.
    model: Option<String>,
}

impl ModelResult {
    /// Reads the result of a job that has succeeded.
    ///
    /// # Errors
    /// If a metric or the model is missing, or the volume's node does not answer within `deadline`.
    pub async fn read(
        namespace: &TestNamespace,
        kind: Kind,
        job: &str,
        status: &ParameterServerJobStatus,
        deadline: Duration,
    ) -> Result<Self> {
        let progress = status.progress.as_ref().with_context(|| format!("{job} reports no progress"))?;
        let metric = |name: &&str| {
            let found = progress.metrics.iter().find(|metric| metric.name == **name);
            let found = found.with_context(|| format!("{job} reports no {name}, but {:?}", progress.metrics))?;
            Ok(((*name).to_owned(), found.value))
        };
        let metrics = kind.metrics().iter().map(metric).collect::<Result<_>>()?;
        if !kind.keeps_the_model() {
            return Ok(Self { metrics, model: None });
        }
        let checksum = || checksum(namespace, kind, job, status);
        let model = until_ok(deadline, &format!("the model of {job}"), checksum).await?;
        Ok(Self { metrics, model: Some(model) })
    }

    /// Returns a sentence about the first difference to the result of an undisturbed job.
    pub fn difference(&self, undisturbed: &Self) -> Option<String> {
        let differs = |(name, value): (&String, &f64)| {
            let want = undisturbed.metrics.get(name)?;
            (value.to_bits() != want.to_bits())
                .then(|| format!("{name} is {value}, that of an undisturbed job is {want}"))
        };
        let models = || (self.model != undisturbed.model).then(|| "the exported model is another one".to_owned());
        self.metrics.iter().find_map(differs).or_else(models)
    }
}

/// Returns the checksum of the exported model, from the node that has the volume.
async fn checksum(
    namespace: &TestNamespace,
    kind: Kind,
    job: &str,
    status: &ParameterServerJobStatus,
) -> Result<String> {
    let path = &status.model.as_ref().with_context(|| format!("{job} reports no model"))?.path;
    let claim = if kind == Kind::FullDisk { disk::CLAIM.to_owned() } else { names::claim(job) };
    let client = || namespace.cluster.client.clone();
    let claim = Api::<PersistentVolumeClaim>::namespaced(client(), &namespace.name).get(&claim).await?;
    let volume = claim.spec.and_then(|spec| spec.volume_name).context("the claim has no volume")?;
    let volume = Api::<PersistentVolume>::all(client()).get(&volume).await?.spec.context("a volume has a spec")?;
    let here = volume.host_path.as_ref().map(|host| &host.path).or(volume.local.as_ref().map(|local| &local.path));
    let folder = here.context("the volume is in no folder of a node")?;
    let node = node_of(&volume).context("the volume is bound to no node")?;
    let sum = run("docker", &["exec", node, "sha256sum", &format!("{folder}/{path}")]).await?;
    Ok(sum.split_whitespace().next().unwrap_or_default().to_owned())
}

/// Returns the node that the volume is bound to, by its first term.
fn node_of(volume: &k8s_openapi::api::core::v1::PersistentVolumeSpec) -> Option<&str> {
    let terms = &volume.node_affinity.as_ref()?.required.as_ref()?.node_selector_terms;
    let wanted = terms.first()?.match_expressions.as_ref()?.first()?;
    wanted.values.as_ref()?.first().map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_compared_to_the_last_bit() {
        let result = |loss: f64, model: &str| ModelResult {
            metrics: [("test_loss".to_owned(), loss)].into(),
            model: Some(model.to_owned()),
        };
        let undisturbed = result(0.1, "a");
        for (label, found, want) in [
            ("equal", result(0.1, "a"), None),
            ("the next number", result(0.1_f64.next_up(), "a"), Some("test_loss")),
            ("another model", result(0.1, "b"), Some("model")),
        ] {
            let difference = found.difference(&undisturbed);
            assert_eq!(difference.is_some(), want.is_some(), "{label}");
            assert!(want.is_none_or(|word| difference.is_some_and(|text| text.contains(word))), "{label}");
        }
    }
}
