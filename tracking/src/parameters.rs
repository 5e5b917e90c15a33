//! The parameters of a run: settings of the job, each under the path of its field.

use std::collections::BTreeMap;

use serde_json::Value;

/// The longest value that MLflow takes, in characters.
const LONGEST: usize = 6000;

/// Returns each value below `value` as text, by its path, as `optimizer.learningRate`; lists as JSON. What is not set is left
/// out.
#[must_use]
pub fn flat(value: &Value) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    collect("", value, &mut found);
    found
}

fn collect(path: &str, value: &Value, found: &mut BTreeMap<String, String>) {
    let text = match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect(&path, value, found);
            }
            return;
        }
        Value::Null => return,
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    found.insert(path.to_owned(), text.chars().take(LONGEST).collect());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_field_has_its_path() {
        let training = json!({
            "optimizer": {"type": "SGD", "learningRate": 0.1, "momentum": null, "betas": [0.9, 0.999]},
            "seed": 7,
            "local": {},
        });
        let wanted = [
            ("optimizer.betas", "[0.9,0.999]"),
            ("optimizer.learningRate", "0.1"),
            ("optimizer.type", "SGD"),
            ("seed", "7"),
        ];
        let wanted = wanted.map(|(path, text)| (path.to_owned(), text.to_owned()));
        assert_eq!(flat(&training), BTreeMap::from(wanted));
    }
}
