//! `docs/reference.md`: every field of the definition as a table, from the same texts as
//! `kubectl explain`. Below a pod template the fields are those of Kubernetes.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::definition;

const HEAD: &str = "# ParameterServerJob reference

Every field of `psjobs.dev/v1alpha1`, written from the definition by `make generate`;
`kubectl explain psjob.spec` shows the same texts. `template` is a pod template of Kubernetes
(`kubectl explain pod.spec`).
";

/// The whole page.
#[must_use]
pub fn reference() -> String {
    let definition = serde_json::to_value(definition()).unwrap_or_default();
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut page = HEAD.to_owned();
    section(&mut page, "spec", &schema["properties"]["spec"]);
    rules(&mut page, schema);
    section(&mut page, "status", &schema["properties"]["status"]);
    page
}

/// One table for an object, then one for each object in it.
fn section(page: &mut String, path: &str, schema: &Value) {
    let Some(fields) = schema["properties"].as_object() else { return };
    let _ = write!(page, "\n## {path}\n\n");
    if let Some(text) = schema["description"].as_str() {
        let _ = write!(page, "{}\n\n", text.trim());
    }
    page.push_str("| field | type | default | meaning |\n|---|---|---|---|\n");
    for (name, field) in fields {
        let _ = writeln!(page, "| `{name}` | {} | {} | {} |", type_of(field), default_of(field), cell(field));
    }
    for (name, field) in fields.iter().filter(|(name, _)| *name != "template") {
        match field["type"].as_str() {
            Some("object") => section(page, &format!("{path}.{name}"), field),
            Some("array") => section(page, &format!("{path}.{name}[]"), &field["items"]),
            _ => {}
        }
    }
}

/// The rules that the API server checks, as the sentences that it answers with.
fn rules(page: &mut String, schema: &Value) {
    let mut found = Vec::new();
    collect(schema, &mut found);
    if !found.is_empty() {
        page.push_str("\n## Rules\n\nThe API server refuses a job with one of these sentences:\n\n");
        found.iter().for_each(|rule| {
            let _ = writeln!(page, "- {rule}");
        });
    }
}

fn collect(schema: &Value, found: &mut Vec<String>) {
    let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
    found.extend(rules.filter_map(|rule| Some(rule["message"].as_str()?.to_owned())));
    let below = schema["properties"].as_object().into_iter().flat_map(Map::values);
    below.chain(schema.get("items")).for_each(|field| collect(field, found));
}

/// `integer 1..4096`, `OnFailure \| Never`, `list of integer`.
fn type_of(field: &Value) -> String {
    if let Some(values) = field["enum"].as_array() {
        return values.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" \\| ");
    }
    let name = field["type"].as_str().unwrap_or("any");
    match (name, field.get("minimum"), field.get("maximum")) {
        ("array", ..) => format!("list of {}", type_of(&field["items"])),
        (_, Some(low), Some(high)) => format!("{name} {}..{}", number(low), number(high)),
        _ => name.to_owned(),
    }
}

/// Whole numbers without `.0`.
fn number(value: &Value) -> String {
    match value.as_f64() {
        Some(number) if number.fract() == 0.0 => format!("{number:.0}"),
        _ => value.to_string(),
    }
}

fn default_of(field: &Value) -> String {
    match field.get("default") {
        None | Some(Value::Object(_)) => String::new(),
        Some(value) => format!("`{value}`"),
    }
}

/// A description on one line of a table.
fn cell(field: &Value) -> String {
    let text = field["description"].as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_explains_every_field_of_ours() {
        let page = reference();
        for line in [
            "## spec.failurePolicy.rules[]",
            "| `replicas` | integer 1..4096 | `1` | Number of trainers, 1 to 4096. It changes while the job runs only with elasticPolicy. Default 1. |",
            "| `startupPolicy` | ServersReady \\| AnyOrder | `\"ServersReady\"` |",
            "## status.progress.metrics[]",
            "- spec.managedBy cannot change; create a new job",
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
        let empty = page.lines().filter(|line| line.starts_with("| `") && line.ends_with("|  |")).collect::<Vec<_>>();
        assert!(empty.is_empty(), "fields without a text: {empty:#?}");
        assert!(!page.contains("activeDeadlineSeconds` | integer | |"), "pod templates are left to Kubernetes");
    }
}
