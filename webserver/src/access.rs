//! Asks the cluster who a visitor is and what they may see. Answers are kept for a minute.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use psjobs_api::crd::GROUP;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;

use crate::cache::Cache;

/// Time for which an answer is kept, and so the longest time in which a right that was taken away still counts.
pub const LIFETIME: Duration = Duration::from_secs(60);
/// Answers of each kind that are kept: a hundred visitors of a hundred namespaces.
const ANSWERS: usize = 10_000;
/// Reviews that are under way at once, so that visitors with wrong tokens are no load for the API server.
const AT_ONCE: usize = 16;
const DEADLINE: Duration = Duration::from_secs(5);

/// A right that a visitor needs in a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// To list jobs.
    Jobs,
    /// To read the logs of pods.
    Logs,
}

/// A token by which it is found in the caches, so that they hold no secret.
type TokenHash = [u8; 32];

/// Reviews of tokens and rights.
pub struct Access {
    client: Client,
    /// `None` is a token that the cluster does not know.
    users: Mutex<Cache<TokenHash, Option<Arc<UserInfo>>>>,
    rights: Mutex<Cache<(TokenHash, Right, String), bool>>,
    turns: Semaphore,
}

/// Somebody whose token the cluster knows.
#[derive(Clone)]
pub struct Visitor {
    access: Arc<Access>,
    token: Arc<str>,
}

/// Why it is not known what a visitor may see.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The token is wrong, or has expired.
    #[error("the cluster does not know this token, or it has expired; make a new one")]
    Unknown,
    /// The cluster did not answer.
    #[error("the cluster does not say what this token may see: {0}; try again in a minute")]
    Unanswered(String),
}

impl Right {
    /// Returns what the cluster is asked about; an empty `namespace` is all of them.
    fn attributes(self, namespace: &str) -> ResourceAttributes {
        let (group, resource, subresource, verb) = match self {
            Self::Jobs => (GROUP, "parameterserverjobs", None, "list"),
            Self::Logs => ("", "pods", Some("log"), "get"),
        };
        ResourceAttributes {
            group: Some(group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource: subresource.map(str::to_owned),
            verb: Some(verb.to_owned()),
            namespace: Some(namespace.to_owned()),
            ..ResourceAttributes::default()
        }
    }
}

impl Access {
    /// Reviews by the cluster of `client`.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            users: Mutex::new(Cache::new(LIFETIME, ANSWERS)),
            rights: Mutex::new(Cache::new(LIFETIME, ANSWERS)),
            turns: Semaphore::new(AT_ONCE),
        }
    }

    /// Returns the visitor with this token.
    ///
    /// # Errors
    /// If the cluster does not know the token, or does not answer.
    pub async fn visitor(self: &Arc<Self>, token: &str) -> Result<Visitor, AccessError> {
        self.user(token).await?;
        Ok(Visitor { access: self.clone(), token: token.into() })
    }

    async fn user(&self, token: &str) -> Result<Arc<UserInfo>, AccessError> {
        let hash: TokenHash = Sha256::digest(token).into();
        let known = self.users.lock().get(&hash, Instant::now());
        if let Some(known) = known {
            return known.ok_or(AccessError::Unknown);
        }
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = self.ask(&TokenReview { spec, ..TokenReview::default() }).await?;
        let status = review.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated == Some(true)).map(Arc::new);
        self.users.lock().put(hash, user.clone(), Instant::now());
        user.ok_or(AccessError::Unknown)
    }

    async fn may(&self, token: &str, right: Right, namespace: &str) -> Result<bool, AccessError> {
        let user = self.user(token).await?;
        let question = (Sha256::digest(token).into(), right, namespace.to_owned());
        let known = self.rights.lock().get(&question, Instant::now());
        if let Some(known) = known {
            return Ok(known);
        }
        let spec = subject(&user, right.attributes(namespace));
        let review = self.ask(&SubjectAccessReview { spec, ..SubjectAccessReview::default() }).await?;
        let allowed = review.status.is_some_and(|status| status.allowed);
        self.rights.lock().put(question, allowed, Instant::now());
        Ok(allowed)
    }

    async fn ask<K>(&self, review: &K) -> Result<K, AccessError>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
    {
        let _turn = self.turns.acquire().await;
        let api = Api::<K>::all(self.client.clone());
        match tokio::time::timeout(DEADLINE, api.create(&PostParams::default(), review)).await {
            Ok(answer) => answer.map_err(|error| AccessError::Unanswered(error.to_string())),
            Err(_) => Err(AccessError::Unanswered(format!("there was no answer in {} s", DEADLINE.as_secs()))),
        }
    }
}

impl Visitor {
    /// Says if the visitor has a right in a namespace, or, if that is empty, in all.
    ///
    /// # Errors
    /// If the cluster does not know the token any more, or does not answer.
    pub async fn may(&self, right: Right, namespace: &str) -> Result<bool, AccessError> {
        self.access.may(&self.token, right, namespace).await
    }

    /// Returns those of `namespaces` whose jobs the visitor may see.
    ///
    /// # Errors
    /// As [`Visitor::may`].
    pub async fn sees(&self, namespaces: BTreeSet<String>) -> Result<BTreeSet<String>, AccessError> {
        if self.may(Right::Jobs, "").await? {
            return Ok(namespaces);
        }
        let namespaces: Vec<String> = namespaces.into_iter().collect();
        let mut seen = BTreeSet::new();
        for some in namespaces.chunks(AT_ONCE) {
            let answers = join_all(some.iter().map(|namespace| self.may(Right::Jobs, namespace))).await;
            for (namespace, may) in some.iter().zip(answers) {
                if may? {
                    seen.insert(namespace.clone());
                }
            }
        }
        Ok(seen)
    }
}

/// Returns the question if `user` may do something.
fn subject(user: &UserInfo, attributes: ResourceAttributes) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username.clone(),
        groups: user.groups.clone(),
        uid: user.uid.clone(),
        extra: user.extra.clone(),
        resource_attributes: Some(attributes),
        ..SubjectAccessReviewSpec::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_cluster_is_asked_about_the_visitor_with_all_that_is_known_of_them() {
        let user = UserInfo {
            username: Some("ann".into()),
            groups: Some(vec!["vision".into()]),
            uid: Some("7".into()),
            extra: Some(BTreeMap::from([("scopes".into(), vec!["read".into()])])),
        };
        for (right, group, resource, subresource, verb) in [
            (Right::Jobs, "psjobs.dev", "parameterserverjobs", None, "list"),
            (Right::Logs, "", "pods", Some("log"), "get"),
        ] {
            let spec = subject(&user, right.attributes("team"));
            let asked = spec.resource_attributes.expect("attributes");
            let asked = (asked.group, asked.resource, asked.subresource, asked.verb, asked.namespace);
            let text = |text: &str| Some(text.to_owned());
            assert_eq!(asked, (text(group), text(resource), subresource.and_then(text), text(verb), text("team")));
            assert_eq!((spec.user, spec.groups), (user.username.clone(), user.groups.clone()));
            assert_eq!((spec.uid, spec.extra), (user.uid.clone(), user.extra.clone()));
        }
    }
}
