//! Decides whether a fault may happen now: a job that lives on two servers must keep one of them. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

/// Time that a server has been ready before it counts as one that holds everything.
const REFILLED: Duration = Duration::from_secs(10);

/// A server of a job that lives on two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Namespace and name.
    pub job: (String, String),
    pub pod: String,
    pub node: Option<String>,
    /// How long it has been ready; `None` if it is not.
    pub ready: Option<Duration>,
}

/// Returns true if each job whose servers are hit keeps one, and all its servers held everything before.
pub fn keeps_a_server(holders: &[Holder], is_hit: impl Fn(&Holder) -> bool) -> bool {
    let mut jobs = BTreeMap::<_, Vec<_>>::new();
    for holder in holders {
        jobs.entry(&holder.job).or_default().push(holder);
    }
    jobs.values().all(|servers| {
        let hit = servers.iter().filter(|server| is_hit(server)).count();
        let is_full = |server: &&Holder| server.ready.is_some_and(|time| time >= REFILLED);
        hit == 0 || hit < servers.len() && servers.iter().all(is_full)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(job: &str, index: u32, node: &str, ready: Option<u64>) -> Holder {
        Holder {
            job: ("soak".into(), job.into()),
            pod: format!("{job}-ps-{index}"),
            node: Some(node.into()),
            ready: ready.map(Duration::from_secs),
        }
    }

    #[test]
    fn no_fault_takes_both_servers_of_a_job() {
        let (full, fresh, away) = (Some(60), Some(3), None);
        let apart = [holder("a", 0, "n1", full), holder("a", 1, "n2", full)];
        let rows = [
            ("apart, one node lost", apart.to_vec(), "n1", true),
            ("apart, a node of others lost", apart.to_vec(), "n3", true),
            ("together", vec![holder("a", 0, "n1", full), holder("a", 1, "n1", full)], "n1", false),
            ("one is being filled", vec![holder("a", 0, "n1", full), holder("a", 1, "n2", fresh)], "n1", false),
            (
                "one is being filled, and is lost",
                vec![holder("a", 0, "n1", full), holder("a", 1, "n2", fresh)],
                "n2",
                false,
            ),
            ("one is not ready", vec![holder("a", 0, "n1", full), holder("a", 1, "n2", away)], "n1", false),
            (
                "one is not ready, others are hit",
                vec![holder("a", 0, "n1", full), holder("a", 1, "n2", away)],
                "n3",
                true,
            ),
            ("one is missing", vec![holder("a", 0, "n1", full)], "n1", false),
            (
                "another job is together",
                [&apart[..], &[holder("b", 0, "n1", full), holder("b", 1, "n1", full)]].concat(),
                "n1",
                false,
            ),
            ("no such job", vec![], "n1", true),
        ];
        for (label, holders, node, want) in rows {
            assert_eq!(keeps_a_server(&holders, |holder| holder.node.as_deref() == Some(node)), want, "{label}");
        }
        // A pod dies while a node is away.
        let hit = |holder: &Holder| holder.node.as_deref() == Some("n1") || holder.pod == "a-ps-1";
        assert!(!keeps_a_server(&apart, hit));
    }
}
