//! Rights of psjobs-web and of its visitors.

use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::operator::{ApiServer, Team, eventually};

const CHART: &str = include_str!("../../../charts/psjobs/templates/web.yaml");

/// Returns how psjobs-web reaches the API server: as a user with the rights that the chart gives it.
pub async fn rights_of_chart(server: &ApiServer, user: String) -> kube::Config {
    grant_chart(&server.client(), &user).await;
    let mut config = server.config.clone();
    config.auth_info.impersonate = Some(user);
    config
}

/// Returns a token of a service account that has rights by these rules in this namespace.
pub async fn token(team: &Team, name: &str, rules: &[Value]) -> String {
    let metadata = json!({"name": name, "namespace": team.namespace});
    let accounts = Api::<ServiceAccount>::namespaced(team.client.clone(), &team.namespace);
    let account = serde_json::from_value(json!({ "metadata": metadata })).expect("an account");
    accounts.create(&PostParams::default(), &account).await.expect("an account can be made");
    if !rules.is_empty() {
        let role: Role = serde_json::from_value(json!({"metadata": metadata, "rules": rules})).expect("a role");
        let roles = Api::namespaced(team.client.clone(), &team.namespace);
        roles.create(&PostParams::default(), &role).await.expect("a role can be made");
        let binding: RoleBinding = serde_json::from_value(json!({
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": team.namespace}],
        }))
        .expect("a binding");
        let bindings = Api::namespaced(team.client.clone(), &team.namespace);
        bindings.create(&PostParams::default(), &binding).await.expect("a binding can be made");
        let user = format!("system:serviceaccount:{}:{name}", team.namespace);
        for rule in rules {
            let text = |field: &str| rule[field][0].as_str().expect("a text").to_owned();
            let (resource, subresource) = match text("resources").split_once('/') {
                Some((resource, below)) => (resource.to_owned(), below.to_owned()),
                None => (text("resources"), String::new()),
            };
            let attributes = json!({
                "namespace": team.namespace, "verb": text("verbs"), "group": text("apiGroups"),
                "resource": resource, "subresource": subresource,
            });
            until_allowed(&team.client, &user, attributes).await;
        }
    }
    let wanted: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}})).expect("a request");
    let made = accounts.create_token_request(name, &PostParams::default(), &wanted).await;
    made.expect("a token can be made").status.expect("it has a status").token
}

/// Gives a user the rights that the chart gives the page.
async fn grant_chart(client: &Client, user: &str) {
    let lines = CHART.lines().filter(|line| !line.trim_start().starts_with("{{")).collect::<Vec<_>>().join("\n");
    let blocks = lines.split("\nrules:\n").skip(1).map(|block| block.split("\n---").next().unwrap_or_default());
    let rules: Vec<PolicyRule> =
        blocks.flat_map(|block| serde_yaml::from_str::<Vec<PolicyRule>>(block).expect("rules are YAML")).collect();
    assert_eq!(rules.len(), 5, "{rules:?}");
    let metadata = kube::core::ObjectMeta { name: Some(user.to_owned()), ..Default::default() };
    let role = ClusterRole { metadata, rules: Some(rules), ..ClusterRole::default() };
    Api::all(client.clone()).create(&PostParams::default(), &role).await.expect("a role can be made");
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }))
    .expect("a binding");
    Api::all(client.clone()).create(&PostParams::default(), &binding).await.expect("a binding can be made");
    let attributes = json!({"verb": "create", "group": "authorization.k8s.io", "resource": "subjectaccessreviews"});
    until_allowed(client, user, attributes).await;
}

/// Waits until the authorizer, which learns of roles from a watch, allows something.
async fn until_allowed(client: &Client, user: &str, attributes: Value) {
    let question = serde_json::from_value(json!({"spec": {"user": user, "resourceAttributes": attributes}}));
    let question: SubjectAccessReview = question.expect("a review");
    eventually("a right", async || {
        let answer = Api::all(client.clone()).create(&PostParams::default(), &question).await.expect("a review");
        answer.status.filter(|status| status.allowed)
    })
    .await;
}
