//! Fields of a manifest that a flag sets: `--set training.consistency.mode=Async`.

use serde_json::{Map, Value};

use crate::bad_input::BadInput;
use crate::manifest;

/// A field below `spec`, and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    path: Vec<String>,
    value: Value,
}

impl std::str::FromStr for Setting {
    type Err = BadInput;

    /// Reads `FIELD=VALUE`; the value is YAML.
    fn from_str(text: &str) -> Result<Self, BadInput> {
        let form = "write it as in --set training.consistency.mode=Async";
        let (path, value) = text.split_once('=').ok_or_else(|| BadInput::new(format!("{text:?} has no =; {form}")))?;
        let path: Vec<_> = path.strip_prefix("spec.").unwrap_or(path).split('.').map(str::to_owned).collect();
        if path.iter().any(String::is_empty) {
            return Err(BadInput::new(format!("{text:?} names no field of spec; {form}")));
        }
        let (mut documents, problem) = manifest::documents(value);
        if let Some(problem) = problem {
            return Err(BadInput::new(format!("the value of {} is {}", path.join("."), problem.message)));
        }
        Ok(Self { path, value: documents.pop().unwrap_or(Value::Null) })
    }
}

impl Setting {
    /// Sets the field in a job's document; what is missing on the way is made. What is not a mapping on the way stays,
    /// and the check of the document says so.
    pub fn apply(&self, document: &mut Value) {
        let mut place = document;
        for name in std::iter::once("spec").chain(self.path.iter().map(String::as_str)) {
            if place.is_null() {
                *place = Value::Object(Map::new());
            }
            place = match place {
                Value::Object(fields) => fields.entry(name).or_insert(Value::Null),
                Value::Array(items) => match name.parse().ok().and_then(|index: usize| items.get_mut(index)) {
                    Some(item) => item,
                    None => return,
                },
                _ => return,
            };
        }
        *place = self.value.clone();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_reach_fields_that_are_there_and_make_those_that_are_not() {
        let mut document = json!({"spec": {"trainer": {"replicas": 2}, "args": ["a", "b"]}});
        for text in ["trainer.replicas=4", "spec.training.optimizer={type: Adam, learningRate: 1e-3}", "args.1=c"] {
            text.parse::<Setting>().expect("a setting").apply(&mut document);
        }
        let training = json!({"optimizer": {"type": "Adam", "learningRate": 1e-3}});
        let expected = json!({"spec": {"trainer": {"replicas": 4}, "args": ["a", "c"], "training": training}});
        assert_eq!(document, expected);
    }

    #[test]
    fn a_setting_without_field_or_value_is_refused_with_its_form() {
        for text in ["replicas", "=3", "trainer..replicas=3", "training={a: "] {
            let error = text.parse::<Setting>().expect_err("refused");
            assert!(error.to_string().contains("--set") || error.to_string().contains("YAML"), "{error}");
        }
    }
}
