//! The cache of nodes: which of them do not answer, and since when. A pod on such a node can neither report its end nor
//! be deleted in the usual way.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeStatus};
use kube::ResourceExt as _;
use kube::runtime::reflector::{ObjectRef, Store};

/// The cache of nodes; empty where the operator works in one namespace, because nodes are in none.
#[derive(Clone)]
pub struct Nodes(Option<Store<Node>>);

impl Nodes {
    pub fn new(store: Option<Store<Node>>) -> Self {
        Self(store)
    }

    /// Returns since when a node does not answer; `None` if it does.
    pub fn lost_since(&self, name: &str) -> Option<Timestamp> {
        let store = self.0.as_ref()?;
        let since = lost_since(&*store.get(&ObjectRef::new(name))?)?;
        let all = store.state();
        let lost = all.iter().filter(|node| lost_since(node).is_some()).count();
        // When most nodes are silent at once, the network to them is probably broken, and their pods run.
        (lost * 2 <= all.len()).then_some(since)
    }
}

/// Returns since when this node does not answer; `None` if it does. A node that reports itself that it is not ready
/// answers: its pods can be deleted as usual.
pub fn lost_since(node: &Node) -> Option<Timestamp> {
    let ready = node.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == "Ready")?;
    ready.last_transition_time.as_ref().filter(|_| ready.status == "Unknown").map(|time| time.0)
}

/// Removes the fields of a node that are not read here.
pub fn slim(node: &mut Node) {
    let name = node.name_any();
    let conditions = node.status.take().and_then(|status| status.conditions).unwrap_or_default();
    let ready = conditions.into_iter().filter(|condition| condition.type_ == "Ready").collect();
    let version = node.metadata.resource_version.take();
    *node = Node {
        metadata: kube::core::ObjectMeta { name: Some(name), resource_version: version, ..Default::default() },
        spec: Some(NodeSpec::default()),
        status: Some(NodeStatus { conditions: Some(ready), ..NodeStatus::default() }),
    };
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;

    use super::*;

    fn node(name: &str, ready: &str) -> Node {
        let time = "2026-01-01T00:00:00Z";
        let yaml = format!(
            "metadata: {{name: {name}, labels: {{a: b}}}}\nspec: {{podCIDR: 10.0.0.0/24}}\nstatus: {{conditions: [\
             {{type: MemoryPressure, status: Unknown, lastTransitionTime: {time}}}, \
             {{type: Ready, status: '{ready}', lastTransitionTime: {time}}}]}}"
        );
        let mut node = serde_yaml::from_str(&yaml).expect("a node");
        slim(&mut node);
        node
    }

    #[test]
    fn a_silent_node_is_lost_unless_most_are_silent() {
        let rows = [
            ("it is ready", &["True", "True", "True"][..], false),
            ("it says that it is not ready", &["False", "True", "True"], false),
            ("it is silent", &["Unknown", "True", "True"], true),
            ("half of them are", &["Unknown", "True"], true),
            ("most of them are", &["Unknown", "Unknown", "True"], false),
            ("the only one is", &["Unknown"], false),
        ];
        for (label, states, lost) in rows {
            let (store, mut writer) = reflector::store();
            for (index, ready) in states.iter().enumerate() {
                writer.apply_watcher_event(&Event::Apply(node(&format!("n{index}"), ready)));
            }
            let since = Nodes::new(Some(store)).lost_since("n0");
            let want = lost.then(|| "2026-01-01T00:00:00Z".parse().expect("a time"));
            assert_eq!(since, want, "{label}");
        }
        assert_eq!(Nodes::new(None).lost_since("n0"), None, "an operator of one namespace sees no nodes");
    }
}
