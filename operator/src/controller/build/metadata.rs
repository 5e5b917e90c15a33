//! Metadata that all children of a job have.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use psjobs_api::crd::names;

use crate::controller::validate::ValidJob;

/// Returns name, labels and owner of a child.
pub fn metadata(job: &ValidJob, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: Some(job.namespace.clone()),
        labels: Some(job_labels(job)),
        owner_references: Some(vec![job.owner.clone()]),
        ..ObjectMeta::default()
    }
}

pub fn job_labels(job: &ValidJob) -> BTreeMap<String, String> {
    [
        (names::LABEL_JOB, job.name.as_str()),
        ("app.kubernetes.io/name", "parameterserverjob"),
        ("app.kubernetes.io/instance", job.name.as_str()),
        ("app.kubernetes.io/managed-by", names::MANAGED_BY),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
}
