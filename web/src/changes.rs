//! Decides what of a set of named values a reader lacks.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde_json::{Map, Value};

/// The values that a reader has, by name.
#[derive(Clone, Debug, Default)]
pub struct Known(BTreeMap<String, u64>);

impl Known {
    /// Returns those of `values` that are new or others than the reader's, and null for each that is gone.
    pub fn changes(&mut self, values: Map<String, Value>) -> Map<String, Value> {
        let gone: Vec<String> = self.0.keys().filter(|name| !values.contains_key(*name)).cloned().collect();
        let mut changes = Map::new();
        for name in gone {
            self.0.remove(&name);
            changes.insert(name, Value::Null);
        }
        for (name, value) in values {
            let hash = hash(&value);
            if self.0.insert(name.clone(), hash) != Some(hash) {
                changes.insert(name, value);
            }
        }
        changes
    }
}

fn hash(value: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.to_string().hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_reader_gets_what_it_lacks() {
        let mut known = Known::default();
        let mut changes = |values: Value| {
            let Value::Object(values) = values else { panic!("an object") };
            Value::Object(known.changes(values))
        };
        assert_eq!(changes(json!({"a": 1, "b": [2]})), json!({"a": 1, "b": [2]}));
        assert_eq!(changes(json!({"a": 1, "b": [3], "c": null})), json!({"b": [3], "c": null}));
        assert_eq!(changes(json!({"b": [3]})), json!({"a": null, "c": null}));
        assert_eq!(changes(json!({"b": [3], "a": 1})), json!({"a": 1}));
    }
}
