//! What spec.network.networkPolicy adds: only the job's own pods and the operator reach the job's pods.

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use psjobs_api::crd::names;
use psjobs_api::{DEFAULT_PORT, METRICS_PORT};

use super::metadata;
use crate::controller::validate::ValidJob;

/// Every namespace has its name as this label.
const NAMESPACE: &str = "kubernetes.io/metadata.name";

/// The policy to make, if the job asks for one. `operator` is the namespace of the one who asks for progress.
pub fn policy(job: &ValidJob, operator: &str) -> Option<NetworkPolicy> {
    if !job.object.spec.network.network_policy {
        return None;
    }
    let own = selector(names::LABEL_JOB, &job.name);
    let of_job = NetworkPolicyPeer { pod_selector: Some(own.clone()), ..NetworkPolicyPeer::default() };
    let in_namespace =
        |selector| NetworkPolicyPeer { namespace_selector: Some(selector), ..NetworkPolicyPeer::default() };
    let of_operator = in_namespace(selector(NAMESPACE, operator));
    let anybody = in_namespace(LabelSelector::default());
    let ingress = vec![from(of_job, None), from(of_operator, Some(DEFAULT_PORT)), from(anybody, Some(METRICS_PORT))];
    Some(NetworkPolicy {
        metadata: metadata(job, names::service(&job.name)),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(own),
            policy_types: Some(vec!["Ingress".into()]),
            ingress: Some(ingress),
            egress: None,
        }),
    })
}

fn selector(label: &str, value: &str) -> LabelSelector {
    LabelSelector { match_labels: Some([(label.to_owned(), value.to_owned())].into()), ..LabelSelector::default() }
}

/// On one port, or on all.
fn from(peer: NetworkPolicyPeer, port: Option<u16>) -> NetworkPolicyIngressRule {
    let port = port.map(|port| NetworkPolicyPort {
        port: Some(IntOrString::Int(port.into())),
        protocol: Some("TCP".into()),
        ..NetworkPolicyPort::default()
    });
    NetworkPolicyIngressRule { from: Some(vec![peer]), ports: port.map(|port| vec![port]) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::controller::fixtures::valid_job;

    #[test]
    fn the_jobs_pods_reach_each_other_the_operator_the_servers_and_everybody_the_metrics() {
        assert_eq!(policy(&valid_job(""), "psjobs-system"), None, "only if it is asked for");
        let policy = policy(&valid_job("network: {networkPolicy: true}"), "psjobs-system").expect("asked for");
        let own = json!({"matchLabels": {"psjobs.dev/job-name": "mnist"}});
        let port = |port: u16| json!([{"port": port, "protocol": "TCP"}]);
        let operator = json!({"matchLabels": {"kubernetes.io/metadata.name": "psjobs-system"}});
        let want = json!({
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": [{"namespaceSelector": operator}], "ports": port(DEFAULT_PORT)},
                {"from": [{"namespaceSelector": {}}], "ports": port(METRICS_PORT)},
            ],
        });
        assert_eq!(serde_json::to_value(policy.spec).expect("JSON"), want);
    }
}
