//! The table of cases that the operator and `psjobs run` both go through in their tests: a job, what happens to it, and
//! how it stands after each event. What only one of the two has (nodes, signals, scaling) is in their own tests.

use psjobs_api::crd::ParameterServerJob;

use crate::job_policy::JobPolicy;

mod table;

pub use table::CASES;

/// A job with one server and two trainers, and what happens to it.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// A sentence.
    pub name: &'static str,
    /// Fields of the spec beside the trainers', as YAML, one a line.
    pub spec: &'static str,
    /// Fields of spec.trainer beside replicas and template, as YAML within braces.
    pub trainer: &'static str,
    /// Events, and how the job stands after each.
    pub steps: &'static [(Event, Want)],
}

/// Something that happens to a job.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The job is created.
    Begin,
    /// All that was started runs, and the servers are ready.
    Run,
    /// The program of a replica, `ps-0` or `trainer-1`, ends with an exit code and these last lines.
    Exit(&'static str, i32, &'static str),
    /// So many seconds pass.
    Pass(u32),
    /// Server 0 reports this step, of 100.
    Step(u64),
}

/// How a job stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Want {
    /// Where it is.
    pub state: State,
    /// The newest incarnation that was started of server 0, trainer 0 and trainer 1; none: not yet.
    pub started: [Option<u32>; 3],
    /// Failures that were given another start and count towards maxRestarts.
    pub counted: u32,
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It trains, or is on its way there.
    Active,
    /// Its trainers are done, its servers not.
    Completing,
    /// It ended well.
    Succeeded,
    /// It ended badly; the reason contains this.
    Failed(&'static str),
}

impl Case {
    /// Returns the job.
    ///
    /// # Panics
    /// If the case is not YAML of a job.
    #[must_use]
    pub fn job(&self) -> ParameterServerJob {
        job(self.spec, self.trainer)
    }
}

/// Returns the policy of a job with these fields of the spec.
#[must_use]
pub fn policy(spec: &str) -> JobPolicy {
    JobPolicy::new(&job(spec, "").spec)
}

fn job(spec: &str, trainer: &str) -> ParameterServerJob {
    let comma = if trainer.is_empty() { "" } else { ", " };
    let text = format!(
        "trainer: {{replicas: 2, template: {{spec: {{containers: [{{name: trainer, image: image}}]}}}}{comma}{trainer}}}\n{spec}"
    );
    let head = serde_json::json!({
        "apiVersion": "psjobs.dev/v1alpha1",
        "kind": "ParameterServerJob",
        "metadata": {"name": "mnist", "namespace": "team", "uid": "0b6c", "generation": 1, "resourceVersion": "1"},
        "spec": serde_yaml::from_str::<serde_json::Value>(&text).expect("the spec is YAML"),
    });
    serde_json::from_value(head).expect("a job")
}
