//! Measures how long a job takes to start and to end. Printed and not asserted, as it depends on the machine's load.

use anyhow::Result;
use futures::TryFutureExt;
use futures::future::try_join_all;
use jiff::Timestamp;
use psjobs_api::crd::Phase;
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::SHORT;

pub async fn start_and_end(namespace: &TestNamespace) -> Result<()> {
    // Some seconds of training, so that the watch sees the job Running.
    let job = training(&["train", "mlp", "--max-steps", "3000", "--log-every", "1"])?;
    let applied = Timestamp::now();
    namespace.apply(&job).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    let trainers = ["mnist-trainer-0", "mnist-trainer-1"];
    let pods = namespace.pods();
    let lines = |words: &'static [&str]| {
        let at = |pod| line(&pods, pod, words, SHORT).map_ok(|line| line.at);
        try_join_all(trainers.map(at))
    };
    let succeeded = async {
        namespace.phase("mnist", Phase::Succeeded, SHORT).await?;
        anyhow::Ok(Timestamp::now())
    };
    let (first_step, done, succeeded) =
        tokio::try_join!(lines(&["training", "step=1 "]), lines(&["finished"]), succeeded)?;
    namespace.ended("mnist-ps-0").await?;
    let gone = Timestamp::now();

    let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).as_secs_f64();
    let (first_step, done) = (first_step.into_iter().max(), done.into_iter().max());
    if let (Some(first_step), Some(done)) = (first_step, done) {
        namespace.print(format_args!(
            "apply to every trainer's first step: {:.1} s (aim: 10)",
            seconds(applied, first_step)
        ));
        namespace.print(format_args!("last trainer done to Succeeded: {:.1} s (aim: 5)", seconds(done, succeeded)));
        namespace.print(format_args!("last trainer done to server gone: {:.1} s (aim: 5)", seconds(done, gone)));
    }
    Ok(())
}
