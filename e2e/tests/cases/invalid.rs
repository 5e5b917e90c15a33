//! The API server refuses invalid manifests, with a message that says what to write instead.

use anyhow::{Result, bail, ensure};
use psjobs_api::crd::Phase;
use psjobs_e2e::manifest::{EXAMPLE, example};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::SHORT;

/// Changes to the example: the text replaced, its replacement, and words of the refusal.
const WRONG: [(&str, &str, &[&str]); 8] = [
    ("replicas: 2", "replica: 2", &["unknown field", "spec.trainer.replica"]),
    ("replicas: 2", "replicas: 0", &["spec.trainer.replicas", "greater than or equal to 1"]),
    ("replicas: 1", "replicas: many", &["spec.ps.replicas", "integer"]),
    ("mode: Async", "mode: Eventually", &["spec.training.consistency.mode", "supported values", "Async"]),
    ("momentum: 0.9", "nesterov: true", &["nesterov needs momentum", "set momentum above 0"]),
    ("type: SGD", "type: Adam", &["momentum is an argument of SGD", "remove it"]),
    ("name: mnist", "name: 1st-try", &["metadata.name must start with a letter"]),
    (
        "name: mnist",
        "name: this-name-is-so-long-that-its-pods-names-do-not-fit-63",
        &["at most 50 characters", "shorten it"],
    ),
];

pub async fn manifests_are_refused(namespace: &TestNamespace) -> Result<()> {
    let good = std::fs::read_to_string(EXAMPLE)?;
    for (right, wrong, words) in WRONG {
        ensure!(good.contains(right), "{EXAMPLE} has no {right:?} to replace");
        refused(namespace, wrong, &good.replacen(right, wrong, 1), words).await?;
    }
    Ok(())
}

pub async fn changes_are_refused(namespace: &TestNamespace) -> Result<()> {
    let mut job = example()?;
    namespace.apply(&job).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    job.spec.ps.replicas = 2;
    let words = ["spec.ps and spec.trainer cannot change while the job runs", "set spec.suspend to true first"];
    refused(namespace, "another spec.ps", &serde_yaml::to_string(&job)?, &words).await
}

async fn refused(namespace: &TestNamespace, what: &str, manifest: &str, words: &[&str]) -> Result<()> {
    match namespace.apply_text(manifest).await {
        Ok(_) => bail!("{what:?} was accepted"),
        Err(error) => {
            let said = format!("{error:#}");
            let missing: Vec<_> = words.iter().filter(|&&word| !said.contains(word)).collect();
            ensure!(missing.is_empty(), "the refusal of {what:?} lacks {missing:?}:\n{said}");
            Ok(())
        }
    }
}
