//! Creates one object. Repeating a creation is safe, because names follow from the job.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Status;
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::Instrument as _;

use super::request;
use super::write_priority::WritePriority;
use super::writer::Writer;
use crate::controller::cache::observed_state::is_owned;
use crate::controller::error::ReconcileError;
use crate::controller::model::Refusal;
use crate::controller::shard;
use crate::traces;

/// The result of a creation.
pub enum Outcome<K> {
    /// The object was created as it was sent, with this metadata.
    Created(Box<ObjectMeta>),
    Exists(Box<K>),
    Refused(Refusal),
}

/// An object to create.
pub struct Creation<'a, K> {
    /// Kind and name, for example `pod mnist-ps-0`.
    pub child: String,
    pub object: &'a K,
    /// Uid of the job that owns it.
    pub owner: &'a str,
    /// The message if the cluster does not have its kind.
    pub missing_kind: Option<&'a str>,
}

impl<'a, K: Resource<DynamicType = ()>> Creation<'a, K> {
    pub fn new(object: &'a K, owner: &'a str) -> Self {
        let child = format!("{} {}", K::kind(&()).to_lowercase(), object.name_any());
        Self { child, object, owner, missing_kind: None }
    }
}

/// Waits for the permit and creates an object, or finds that it exists.
pub async fn create<K>(writer: &Writer, api: &Api<K>, creation: &Creation<'_, K>) -> Result<Outcome<K>, ReconcileError>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let creating = async {
        let _permit = writer.permit(WritePriority::Child).await?;
        send(api, creation).await
    };
    creating.instrument(traces::child(|| creation.child.clone())).await
}

/// Creates an object, for which the caller holds the permit, or finds that it exists: the cache may be behind the
/// operator's own writes.
pub async fn send<K>(api: &Api<K>, creation: &Creation<'_, K>) -> Result<Outcome<K>, ReconcileError>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let Creation { child, object, missing_kind, .. } = creation;
    match request::create(api, *object).await {
        Ok(metadata) => Ok(Outcome::Created(metadata.into())),
        Err(kube::Error::Api(status)) if status.is_already_exists() => find_existing(api, creation).await,
        Err(kube::Error::Api(status)) if status.code == 404 && missing_kind.is_some() => {
            Ok(refused(child, missing_kind.unwrap_or_default()))
        }
        Err(kube::Error::Api(status)) if !is_overload(&status) => Ok(refused(child, &status.message)),
        Err(source) => Err(ReconcileError::Api { what: format!("create {child}"), source: Box::new(source) }),
    }
}

/// Reads the object that has the name already, and returns whether it is the job's.
async fn find_existing<K>(api: &Api<K>, creation: &Creation<'_, K>) -> Result<Outcome<K>, ReconcileError>
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let Creation { child, object, owner, .. } = creation;
    match api.get_opt(&object.name_any()).await {
        Ok(Some(existing)) if is_owned(&existing, owner) && !shard::same(&existing, *object) => {
            Err(ReconcileError::Disputed { child: child.clone() })
        }
        Ok(Some(existing)) if is_owned(&existing, owner) => Ok(Outcome::Exists(existing.into())),
        Ok(Some(existing)) if existing.meta().deletion_timestamp.is_some() => {
            Ok(refused(child, &format!("an earlier {child} is still being deleted")))
        }
        Ok(Some(_)) => {
            let message = format!(
                "there is another {child} that does not belong to this job; delete it or give the job another name"
            );
            Ok(refused(child, &message))
        }
        Ok(None) => Ok(refused(child, &format!("an earlier {child} was just deleted"))),
        Err(source) => Err(ReconcileError::Api { what: format!("read {child}"), source: Box::new(source) }),
    }
}

fn refused<K>(child: &str, message: &str) -> Outcome<K> {
    Outcome::Refused(Refusal { child: child.to_owned(), message: message.to_owned() })
}

/// Returns whether the API server refused a request only because it is overloaded, which says nothing about the object.
pub fn is_overload(status: &Status) -> bool {
    matches!(status.code, 429 | 503 | 504)
}
