//! Requests to which the API server answers with metadata alone. The operator knows the rest of the object, and encoding
//! a whole pod or job is a good part of the cost of such a request when hundreds of jobs begin or end together.

use http::header::{ACCEPT, HeaderValue};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, PostParams};
use kube::core::{PartialObjectMeta, Request};
use kube::{Api, Error, Resource, Result};
use serde::Serialize;
use serde_json::json;

use crate::controller::error::ReconcileError;

/// Asks for metadata only, see
/// <https://kubernetes.io/docs/reference/using-api/api-concepts/#metadata-only-fetches>.
const METADATA: HeaderValue =
    HeaderValue::from_static("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json");

/// Name under which the API server notes who wrote what, in metadata.managedFields.
const FIELD_MANAGER: &str = "psjobs-operator";

/// Creates an object. Returns its metadata.
pub async fn create<K: Clone + Resource + Serialize>(api: &Api<K>, object: &K) -> Result<ObjectMeta> {
    let body = serde_json::to_vec(object).map_err(Error::SerdeError)?;
    answer(api, "create", Request::new(api.resource_url()).create(&signed(), body)).await
}

/// Replaces the status of an object that still has this resource version. Returns its new metadata. Only the status is
/// sent, because the API server ignores the rest. A patch would cost it a seventh more, because it converts the object to
/// JSON and back to change it.
pub async fn replace_status<K>(api: &Api<K>, of: &ObjectMeta, status: &impl Serialize) -> Result<ObjectMeta>
where
    K: Clone + Resource<DynamicType = ()>,
{
    let name = of.name.as_deref().unwrap_or_default();
    let metadata =
        json!({"name": name, "namespace": of.namespace, "uid": of.uid, "resourceVersion": of.resource_version});
    let object =
        json!({"apiVersion": K::api_version(&()), "kind": K::kind(&()), "metadata": metadata, "status": status});
    let body = serde_json::to_vec(&object).map_err(Error::SerdeError)?;
    let request = Request::new(api.resource_url()).replace_subresource("status", name, &signed(), body);
    answer(api, "replace_status", request).await
}

/// Deletes an object.
pub async fn delete<K: Clone + Resource>(api: &Api<K>, name: &str, params: &DeleteParams) -> Result<()> {
    let request = Request::new(api.resource_url()).delete(name, params).map_err(Error::BuildRequest)?;
    api.clone().into_client().request_text(brief(request, "delete")).await.map(drop)
}

fn signed() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() }
}

async fn answer<K: Clone + Resource>(
    api: &Api<K>,
    verb: &'static str,
    request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
) -> Result<ObjectMeta> {
    let request = brief(request.map_err(Error::BuildRequest)?, verb);
    let object: PartialObjectMeta = api.clone().into_client().request(request).await?;
    Ok(object.metadata)
}

/// Asks for metadata only, and passes `verb` to the client as the name of the request's span in traces.
fn brief(mut request: http::Request<Vec<u8>>, verb: &'static str) -> http::Request<Vec<u8>> {
    request.headers_mut().insert(ACCEPT, METADATA);
    request.extensions_mut().insert(verb);
    request
}

/// Takes a request about an object that is gone, or whose name another object has by now, for a success.
pub fn ignore_gone(result: kube::Result<()>, what: impl FnOnce() -> String) -> Result<(), ReconcileError> {
    match result {
        // 404: the object is gone. 409: another object has its name and another uid.
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        Err(source) => Err(ReconcileError::Api { what: what(), source: Box::new(source) }),
        Ok(()) => Ok(()),
    }
}
