//! The jobs of a soak: first one of each kind whose result repeats, undisturbed; then of every kind one after the other,
//! all kinds at once, until the time is over.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::{join_all, try_join_all};

use super::job_run::run_job;
use super::kind::{Kind, Repeats};
use super::result::ModelResult;
use super::stage::Stage;

/// Runs a job of each kind that repeats, and returns their results.
///
/// # Errors
/// If one of them fails.
pub async fn undisturbed(stage: &Stage) -> Result<BTreeMap<Kind, ModelResult>> {
    let kinds = Kind::ALL.into_iter().filter(|kind| kind.repeats() != Repeats::Never);
    let results = try_join_all(kinds.map(|kind| async move {
        let result = run(stage, kind, 0, None).await?;
        Ok::<_, anyhow::Error>((kind, result.with_context(|| format!("the undisturbed {} job failed", kind.name()))?))
    }));
    Ok(results.await?.into_iter().collect())
}

/// Runs jobs of all kinds. The last ones begin before `last`, and are waited for.
pub async fn under_faults(stage: &Stage, undisturbed: &BTreeMap<Kind, ModelResult>, last: Duration) {
    let of_kind = |kind| async move {
        for number in 1.. {
            if stage.board.now() >= last {
                return;
            }
            if let Err(error) = run(stage, kind, number, undisturbed.get(&kind)).await {
                stage.board.problem(format!("no more {} jobs: {error:#}", kind.name()));
                return;
            }
        }
    };
    join_all(Kind::ALL.map(of_kind)).await;
}

async fn run(stage: &Stage, kind: Kind, number: u32, undisturbed: Option<&ModelResult>) -> Result<Option<ModelResult>> {
    let result = run_job(&stage.board, stage.namespace(kind), kind, number, undisturbed).await?;
    if kind == Kind::FullDisk {
        stage.disk.forget(&format!("{}-{number}", kind.name())).await?;
    }
    Ok(result)
}
