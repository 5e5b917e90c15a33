//! Which pods are meant.

use k8s_openapi::api::core::v1::Pod;
use psjobs_api::Role;
use psjobs_api::crd::ParameterServerJobSpec;
use psjobs_api::crd::names::{LABEL_INDEX, LABEL_JOB, LABEL_ROLE};

/// A server or trainer of a job, whichever pod it is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    pub role: Role,
    pub index: u32,
}

/// Which replicas of a job are meant.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    role: Option<Role>,
    index: Option<u32>,
    /// The role that the servers' pods have as a label.
    server_pods: Role,
}

impl Filter {
    /// Accepts a role, of it one index; or one rank in a job with this spec.
    pub fn new(role: Option<Role>, index: Option<u32>, rank: Option<u32>, spec: &ParameterServerJobSpec) -> Self {
        let (servers, server_pods) = (spec.servers().unsigned_abs(), spec.pod_role(Role::Server));
        match rank {
            Some(rank) if rank < servers => Self { role: Some(Role::Server), index: Some(rank), server_pods },
            Some(rank) => Self { role: Some(Role::Trainer), index: Some(rank - servers), server_pods },
            None => Self { role, index, server_pods },
        }
    }

    pub fn has(&self, replica: Replica) -> bool {
        self.role.is_none_or(|role| role == replica.role) && self.index.is_none_or(|index| index == replica.index)
    }

    /// The replica that a program of the job is, if it is meant.
    pub fn accepts(&self, pod: &Pod) -> Option<Replica> {
        let labels = pod.metadata.labels.as_ref()?;
        let replica =
            Replica { role: Role::parse(labels.get(LABEL_ROLE)?)?, index: labels.get(LABEL_INDEX)?.parse().ok()? };
        self.has(replica).then_some(replica)
    }

    /// The label selector of the pods.
    pub fn selector(&self, job: &str) -> String {
        let label = |role| if role == Role::Server { self.server_pods } else { role };
        let role = self.role.map(|role| format!(",{LABEL_ROLE}={}", label(role)));
        let index = self.index.map(|index| format!(",{LABEL_INDEX}={index}"));
        format!("{LABEL_JOB}={job}{}{}", role.unwrap_or_default(), index.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(ps: &str) -> ParameterServerJobSpec {
        let text = format!("{{ps: {ps}, trainer: {{replicas: 2, template: {{}}}}}}");
        serde_yaml::from_str(&text).expect("a spec")
    }

    #[test]
    fn ranks_are_those_of_the_job() {
        let two = spec("{replicas: 2}");
        let rank = |rank| Filter::new(None, None, Some(rank), &two).selector("mnist");
        assert_eq!(rank(1), "psjobs.dev/job-name=mnist,psjobs.dev/role=ps,psjobs.dev/index=1");
        assert_eq!(rank(2), "psjobs.dev/job-name=mnist,psjobs.dev/role=trainer,psjobs.dev/index=0");
        let all = Filter::new(None, None, None, &two);
        assert_eq!(all.selector("mnist"), "psjobs.dev/job-name=mnist");
        assert!(all.has(Replica { role: Role::Server, index: 7 }));
        let trainers = Filter::new(Some(Role::Trainer), None, None, &two);
        assert!(!trainers.has(Replica { role: Role::Server, index: 0 }));
    }

    #[test]
    fn a_colocated_server_is_in_the_pod_of_a_trainer() {
        let servers = Filter::new(None, None, Some(1), &spec("{placement: Colocated}"));
        assert_eq!(servers.selector("mnist"), "psjobs.dev/job-name=mnist,psjobs.dev/role=trainer,psjobs.dev/index=1");
        assert!(!servers.has(Replica { role: Role::Trainer, index: 1 }));
    }
}
