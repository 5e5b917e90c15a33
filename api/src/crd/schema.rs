//! The CustomResourceDefinition as it is installed: what kube derives, less what would make it too
//! large for `kubectl apply` (its annotation holds at most 262,144 bytes) or what Kubernetes warns about.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde_json::Value;

use super::ParameterServerJob;

/// The definition that `crds/` and the chart hold.
///
/// # Panics
/// Never: the derived definition always survives the way through JSON.
#[must_use]
pub fn definition() -> CustomResourceDefinition {
    let mut value = serde_json::to_value(ParameterServerJob::crd()).expect("a definition is JSON");
    tidy(&mut value, false);
    own_as_wholes(&mut value);
    serde_json::from_value(value).expect("tidying keeps the structure")
}

/// Drops the descriptions inside pod templates (`kubectl explain pod.spec` has them) and the
/// number formats that Kubernetes does not know; joins the lines of a comment, because `kubectl
/// explain` breaks them anew. Limits ports that may be names: a greater number could be stored and not be read.
fn tidy(value: &mut Value, in_template: bool) {
    match value {
        Value::Object(object) => {
            if in_template && object.get("description").is_some_and(Value::is_string) {
                object.remove("description");
            }
            join_lines(object);
            if object.get("format").and_then(Value::as_str).is_some_and(|format| format.starts_with("uint")) {
                object.remove("format");
            }
            for (key, child) in object.iter_mut() {
                match child {
                    Value::Object(schema) if key == "port" && schema.contains_key("x-kubernetes-int-or-string") => {
                        schema.insert("maximum".into(), u16::MAX.into());
                    }
                    Value::Object(schema) if key == "template" => {
                        join_lines(schema);
                        // The template's own description stays, only what is below it goes.
                        schema.values_mut().for_each(|below| tidy(below, true));
                    }
                    child => tidy(child, in_template),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| tidy(item, in_template)),
        _ => {}
    }
}

/// Gives each policy in the spec one owner, as it is written by one: an account field by field of who
/// wrote `training` and the like is a fifth of an object, and the API server goes through it with
/// every status. Whoever changes one field of a policy by server-side apply gives all of them.
fn own_as_wholes(definition: &mut Value) {
    let versions = definition["spec"]["versions"].as_array_mut().into_iter().flatten();
    for version in versions {
        let spec = &mut version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        for (name, field) in spec.as_object_mut().into_iter().flatten() {
            // Others scale the replicas.
            if field["type"] == "object" && !["ps", "trainer"].contains(&name.as_str()) {
                field["x-kubernetes-map-type"] = "atomic".into();
            }
        }
    }
}

/// Paragraphs stay apart.
fn join_lines(schema: &mut serde_json::Map<String, Value>) {
    if let Some(Value::String(text)) = schema.get_mut("description") {
        *text = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " ")).collect::<Vec<_>>().join("\n\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_fits_the_annotation_of_kubectl_apply() {
        let json = serde_json::to_string(&definition()).expect("serializes");
        assert!(json.len() < 200_000, "{} bytes", json.len());
    }

    #[test]
    fn users_find_help_on_our_fields() {
        let json = serde_json::to_string(&definition()).expect("serializes");
        for text in ["when it arrives", "GPUs for each trainer", "Pod template of the trainers"] {
            assert!(json.contains(text), "{text:?} is in no description");
        }
    }
}
