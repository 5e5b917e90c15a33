//! Where the servers run: `spec.ps.placement`, and what its rules say.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where the servers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Placement {
    /// Each server has a pod of its own.
    #[default]
    Separate,
    /// A server in the pod of each trainer.
    Colocated,
}

/// In a rule of the spec: servers have pods of their own.
pub(super) const IS_SEPARATE: &str = "self.ps.placement != 'Colocated'";
/// Fields of spec.ps.template.spec that concern a whole pod: with Colocated the pod is that of spec.trainer.template.
const FIELDS_OF_POD: [&str; 38] = [
    "activeDeadlineSeconds",
    "affinity",
    "automountServiceAccountToken",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "ephemeralContainers",
    "hostAliases",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "hostUsers",
    "hostname",
    "imagePullSecrets",
    "initContainers",
    "nodeName",
    "nodeSelector",
    "os",
    "overhead",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "readinessGates",
    "resourceClaims",
    "resources",
    "restartPolicy",
    "runtimeClassName",
    "schedulerName",
    "schedulingGates",
    "securityContext",
    "serviceAccount",
    "serviceAccountName",
    "setHostnameAsFQDN",
    "shareProcessNamespace",
    "subdomain",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
];

/// In a rule of spec.ps: its template says nothing but how the server's container is, and how long that has to end.
pub(super) fn is_one_container() -> String {
    let given = FIELDS_OF_POD.map(|field| format!("has(self.template.spec.{field})")).join(", ");
    format!(
        "!has(self.template) || !has(self.template.spec) || !has(self.template.metadata) && \
         size(self.template.spec.containers) <= 1 && ![{given}].exists(given, given)"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::crd::{ParameterServerJobSpec, definition};

    /// A field of pods that a newer version of Kubernetes has would otherwise be ignored.
    #[test]
    fn every_field_of_a_pod_is_the_servers_own_or_refused_beside_a_trainer() {
        let definition = serde_json::to_value(definition()).expect("JSON");
        let spec = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        let fields = &spec["ps"]["properties"]["template"]["properties"]["spec"]["properties"];
        let fields: BTreeSet<&str> = fields.as_object().expect("an object").keys().map(String::as_str).collect();
        let own = ["containers", "terminationGracePeriodSeconds"];
        assert_eq!(fields, FIELDS_OF_POD.into_iter().chain(own).collect());
    }

    #[test]
    fn a_colocated_job_has_a_server_for_each_trainer() {
        for (ps, want) in [("{}", 1), ("{replicas: 3}", 3), ("{placement: Colocated}", 4)] {
            let text = format!("{{ps: {ps}, trainer: {{replicas: 4, template: {{}}}}}}");
            let spec: ParameterServerJobSpec = serde_yaml::from_str(&text).expect("a spec");
            assert_eq!(spec.servers(), want, "{ps}");
        }
    }
}
