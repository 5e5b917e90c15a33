//! Builds the network policy of spec.network.networkPolicy: only the job's own pods reach the job's pods, except for
//! metrics and probes.

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use psjobs_api::METRICS_PORT;
use psjobs_api::crd::names;

use super::metadata::metadata;
use crate::controller::validate::ValidJob;

/// Builds the policy, if the job asks for one.
pub fn policy(job: &ValidJob) -> Option<NetworkPolicy> {
    if !job.object.spec.network.network_policy {
        return None;
    }
    let label = (names::LABEL_JOB.to_owned(), job.name.clone());
    let own = LabelSelector { match_labels: Some([label].into()), ..LabelSelector::default() };
    let of_job = NetworkPolicyPeer { pod_selector: Some(own.clone()), ..NetworkPolicyPeer::default() };
    let everywhere = Some(LabelSelector::default());
    let anybody = NetworkPolicyPeer { namespace_selector: everywhere, ..NetworkPolicyPeer::default() };
    let ingress = vec![from(of_job, None), from(anybody, Some(METRICS_PORT))];
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

/// Allows a peer one port, or all ports.
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
    fn the_jobs_pods_reach_each_other_and_everybody_the_metrics() {
        assert_eq!(policy(&valid_job("")), None, "only if it is asked for");
        let policy = policy(&valid_job("network: {networkPolicy: true}")).expect("asked for");
        let own = json!({"matchLabels": {"psjobs.dev/job-name": "mnist"}});
        let port = |port: u16| json!([{"port": port, "protocol": "TCP"}]);
        let want = json!({
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": [{"namespaceSelector": {}}], "ports": port(METRICS_PORT)},
            ],
        });
        assert_eq!(serde_json::to_value(policy.spec).expect("JSON"), want);
    }
}
