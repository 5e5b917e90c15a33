//! Objects that a deleted job has left in its namespace.

use std::fmt::Debug;

use anyhow::Result;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret, Service};
use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::namespace::TestNamespace;

/// Kubernetes creates this ConfigMap in every namespace.
const OF_KUBERNETES: &str = "kube-root-ca.crt";

/// Returns the names of pods and other objects in the namespace.
///
/// # Errors
/// If the cluster does not answer.
pub async fn of(namespace: &TestNamespace) -> Result<Vec<String>> {
    let mut left = named::<Pod>(namespace).await?;
    left.extend(named::<Service>(namespace).await?);
    left.extend(named::<Secret>(namespace).await?);
    left.extend(named::<PersistentVolumeClaim>(namespace).await?);
    left.extend(named::<ConfigMap>(namespace).await?);
    left.extend(named::<Lease>(namespace).await?);
    left.retain(|name| !name.ends_with(OF_KUBERNETES));
    Ok(left)
}

/// Returns the objects of one kind, for example `Pod mnist-ps-0`.
async fn named<K>(namespace: &TestNamespace) -> Result<Vec<String>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let api = Api::<K>::namespaced(namespace.cluster.client.clone(), &namespace.name);
    let objects = api.list_metadata(&ListParams::default()).await?.items;
    Ok(objects.iter().map(|object| format!("{} {}", K::kind(&()), object.name_any())).collect())
}
