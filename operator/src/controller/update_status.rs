//! Writes the status: only what changed, and only on top of what was read. A JSON merge patch with the
//! resource version says exactly that; server-side apply would force a field over another writer's
//! newer one, and a restart that was counted on an old status would be counted twice.

use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus};
use serde_json::{Map, Value, json};

use super::ReconcileError;

/// Name under which the API server notes the operator's writes.
const FIELD_MANAGER: &str = "psjobs-operator";

/// Writes `status` if it differs from the job's. Returns the job as stored then.
pub async fn update_status(
    client: &Client,
    job: &ParameterServerJob,
    status: &ParameterServerJobStatus,
) -> Result<Option<ParameterServerJob>, ReconcileError> {
    let Some(patch) = status_patch(job, status)? else { return Ok(None) };
    let jobs = Api::<ParameterServerJob>::namespaced(client.clone(), &job.namespace().unwrap_or_default());
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    match jobs.patch_status(&job.name_any(), &params, &Patch::Merge(patch)).await {
        Ok(stored) => Ok(Some(stored)),
        Err(kube::Error::Api(answer)) if answer.is_conflict() => Err(ReconcileError::OutOfDate),
        Err(kube::Error::Api(answer)) if answer.is_not_found() => Ok(None),
        Err(source) => Err(ReconcileError::Api { what: "write the status".into(), source: Box::new(source) }),
    }
}

fn status_patch(job: &ParameterServerJob, status: &ParameterServerJobStatus) -> Result<Option<Value>, ReconcileError> {
    let old = serde_json::to_value(job.status.clone().unwrap_or_default()).map_err(ReconcileError::Json)?;
    let new = serde_json::to_value(status).map_err(ReconcileError::Json)?;
    let change = merge_patch(&old, &new);
    let metadata = json!({"uid": job.metadata.uid, "resourceVersion": job.metadata.resource_version});
    Ok(change.map(|change| json!({"metadata": metadata, "status": change})))
}

/// The merge patch (RFC 7396) from `old` to `new`, `None` if they are equal.
fn merge_patch(old: &Value, new: &Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let removed = old.keys().filter(|key| !new.contains_key(*key)).map(|key| (key.clone(), Value::Null));
            let changed = new.iter().filter_map(|(key, value)| {
                let change = old.get(key).map_or_else(|| Some(value.clone()), |old| merge_patch(old, value));
                Some((key.clone(), change?))
            });
            let patch = removed.chain(changed).collect::<Map<_, _>>();
            (!patch.is_empty()).then_some(Value::Object(patch))
        }
        (old, new) => (old != new).then(|| new.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_holds_what_changed_and_nothing_else() {
        let rows = [
            (json!({"a": 1}), json!({"a": 1}), None),
            (json!({"a": 1, "b": 2}), json!({"a": 1, "b": 3}), Some(json!({"b": 3}))),
            (json!({"a": 1, "b": 2}), json!({"a": 1}), Some(json!({"b": null}))),
            (json!({}), json!({"a": {"b": 1}}), Some(json!({"a": {"b": 1}}))),
            (json!({"a": {"b": 1, "c": 2}}), json!({"a": {"c": 2, "d": 3}}), Some(json!({"a": {"b": null, "d": 3}}))),
            (json!({"a": [1, 2]}), json!({"a": [1]}), Some(json!({"a": [1]}))),
        ];
        for (old, new, want) in rows {
            assert_eq!(merge_patch(&old, &new), want, "from {old} to {new}");
        }
    }
}
