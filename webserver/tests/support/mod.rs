//! psjobs-web in this process, its visitors, and the jobs that it shows.

#[path = "../../../operator/tests/support/mod.rs"]
pub mod operator;
mod page;
mod rights;

use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use operator::Team;
pub use page::Page;
use psjobs_api::crd::ParameterServerJob;
pub use rights::{rights_of_chart, token};
use serde_json::{Value, json};

fn jobs(team: &Team) -> Api<ParameterServerJob> {
    team.api()
}

/// Creates a job with 1 server and 1 trainer.
pub async fn create(team: &Team, name: &str) {
    let template = json!({"spec": {"containers": [{"name": "trainer", "image": "psjobs-worker:0.1.0"}]}});
    let job = serde_json::from_value(json!({
        "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "metadata": {"name": name},
        "spec": {"trainer": {"replicas": 1, "template": template}},
    }));
    let job: ParameterServerJob = job.expect("a job");
    Box::pin(jobs(team).create(&PostParams::default(), &job)).await.expect("the job is accepted");
}

pub async fn write_status(team: &Team, name: &str, status: Value) {
    let patch = Patch::Merge(json!({ "status": status }));
    let patched = Box::pin(jobs(team).patch_status(name, &PatchParams::default(), &patch)).await;
    patched.expect("the status is accepted");
}

pub async fn delete(team: &Team, name: &str) {
    jobs(team).delete(name, &DeleteParams::default()).await.expect("the job can be deleted");
}

/// Progress as a status has it.
pub fn progress(step: u32, loss: f64) -> Value {
    let metrics = json!([{"name": "loss", "value": loss}]);
    json!({"step": step, "totalSteps": 20, "percent": step * 5, "summary": "some", "metrics": metrics})
}
