//! Checks a manifest against the schema of the CustomResourceDefinition, as the API server does:
//! unknown fields, types, ranges, enums and required fields; and fills in the schema's defaults.

use serde_json::{Map, Value};

use super::Finding;
use super::path::FieldPath;
use super::suggest::did_you_mean;

/// Everything in `value` that `schema` does not allow.
pub fn check(schema: &Value, value: &Value) -> Vec<Finding> {
    let mut checker = Checker { root: schema, findings: Vec::new() };
    checker.check(schema, value, &FieldPath::default());
    checker.findings
}

/// Fills in defaults from the top down. A null counts as absent where it is not allowed and there is
/// a default.
pub fn fill_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(object) => {
            for (name, property) in entries(schema, "properties") {
                let absent = match object.get(name) {
                    None => true,
                    Some(value) => value.is_null() && !flag(property, "nullable"),
                };
                if let Some(default) = property.get("default").filter(|_| absent) {
                    object.insert(name.clone(), default.clone());
                }
                if let Some(child) = object.get_mut(name) {
                    fill_defaults(property, child);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill_defaults(&schema["items"], item)),
        _ => {}
    }
}

struct Checker<'a> {
    root: &'a Value,
    findings: Vec<Finding>,
}

impl Checker<'_> {
    fn check(&mut self, schema: &Value, value: &Value, path: &FieldPath) {
        if value.is_null() && flag(schema, "nullable") {
            return;
        }
        if !has_type(schema, value) {
            let advice = advice_for_type(schema, value);
            return self.report(path, format!("{path} is {}; write {advice}", shown(value)));
        }
        if let Some(allowed) = schema["enum"].as_array()
            && !allowed.contains(value)
        {
            return self.report(path, format!("{path} is {}; write {}", shown(value), expected(schema)));
        }
        match value {
            Value::Object(object) => self.check_object(schema, object, path),
            Value::Array(items) => {
                self.check_bound(
                    schema["maxItems"].as_u64().is_none_or(|most| items.len() as u64 <= most),
                    path,
                    || format!("{path} has {} entries; write at most {}", items.len(), schema["maxItems"]),
                );
                for (index, item) in items.iter().enumerate() {
                    self.check(&schema["items"], item, &path.index(index));
                }
            }
            Value::Number(number) => {
                let number = number.as_f64().unwrap_or(f64::NAN);
                let (low, high) = bounds(schema);
                self.check_bound((low..=high).contains(&number), path, || {
                    format!("{path} is {value}; write {}", expected(schema))
                });
            }
            Value::String(text) => {
                let length = text.chars().count() as u64;
                let least = schema["minLength"].as_u64().unwrap_or(0);
                let most = schema["maxLength"].as_u64().unwrap_or(u64::MAX);
                self.check_bound((least..=most).contains(&length), path, || {
                    format!("{path} has {length} characters; write {least} to {most}")
                });
            }
            Value::Null | Value::Bool(_) => {}
        }
    }

    fn check_object(&mut self, schema: &Value, object: &Map<String, Value>, path: &FieldPath) {
        let properties = &schema["properties"];
        let others = &schema["additionalProperties"];
        for (name, value) in object {
            let path = path.key(name);
            if let Some(property) = properties.get(name) {
                self.check(property, value, &path);
            } else if others.is_object() {
                self.check(others, value, &path);
            } else if properties.is_object() && !flag(schema, "x-kubernetes-preserve-unknown-fields") {
                let advice = did_you_mean(name, schema, self.root);
                self.report(&path, format!("{path} is no known field; {advice}"));
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !object.contains_key(name) {
                let path = path.key(name);
                self.report(&path, format!("{path} is missing; write {}", expected(&properties[name])));
            }
        }
    }

    fn check_bound(&mut self, holds: bool, path: &FieldPath, message: impl FnOnce() -> String) {
        if !holds {
            self.report(path, message());
        }
    }

    fn report(&mut self, path: &FieldPath, message: String) {
        self.findings.push(Finding::new(path, message));
    }
}

fn has_type(schema: &Value, value: &Value) -> bool {
    if flag(schema, "x-kubernetes-int-or-string") {
        return value.is_i64() || value.is_string();
    }
    match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("number") => value.is_number(),
        Some("integer") => value.is_i64() || value.is_u64(),
        _ => true,
    }
}

/// The least and the greatest number allowed.
fn bounds(schema: &Value) -> (f64, f64) {
    let (low, high) = match schema["format"].as_str() {
        Some("int32") => (f64::from(i32::MIN), f64::from(i32::MAX)),
        Some("int64") => (i64::MIN as f64, i64::MAX as f64),
        _ => (f64::NEG_INFINITY, f64::INFINITY),
    };
    (schema["minimum"].as_f64().unwrap_or(low), schema["maximum"].as_f64().unwrap_or(high))
}

/// Describes the values that a field allows.
fn expected(schema: &Value) -> String {
    if let Some(allowed) = schema["enum"].as_array() {
        let names: Vec<_> = allowed.iter().filter_map(Value::as_str).collect();
        return match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, names)) => format!("{} or {last}", names.join(", ")),
            None => "nothing".into(),
        };
    }
    if flag(schema, "x-kubernetes-int-or-string") {
        return "a whole number or text".into();
    }
    let range = match (schema["minimum"].as_f64(), schema["maximum"].as_f64()) {
        (Some(low), Some(high)) => format!(" from {low} to {high}"),
        (Some(low), None) => format!(" from {low}"),
        (None, Some(high)) => format!(" up to {high}"),
        (None, None) => String::new(),
    };
    match schema["type"].as_str() {
        Some("integer") => format!("a whole number{range}"),
        Some("number") => format!("a number{range}"),
        Some("boolean") => "true or false".into(),
        Some("string") => "text".into(),
        Some("array") => "a list".into(),
        _ => match required(schema).as_slice() {
            [] => "a mapping of fields".into(),
            names => format!("a mapping with {}", names.join(" and ")),
        },
    }
}

fn required(schema: &Value) -> Vec<&str> {
    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Like [`expected`], with the fix spelled out where the mistake is a usual one.
fn advice_for_type(schema: &Value, value: &Value) -> String {
    match (schema["type"].as_str(), value) {
        (Some("string"), Value::Number(_) | Value::Bool(_)) => format!("it in quotes: \"{value}\""),
        (Some("array"), Value::String(text)) if schema["items"]["type"] == "string" => {
            format!("a list: [{}]", text.split_whitespace().collect::<Vec<_>>().join(", "))
        }
        (Some("integer" | "number" | "boolean"), Value::String(text)) if is_json_scalar(schema, text) => {
            format!("it without quotes: {text}")
        }
        _ => expected(schema),
    }
}

fn is_json_scalar(schema: &Value, text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|value| has_type(schema, &value))
}

/// A value as it stands in the manifest, shortened.
fn shown(value: &Value) -> String {
    const LONGEST: usize = 40;
    match value {
        Value::Null => "empty".into(),
        Value::Object(_) => "a mapping".into(),
        Value::Array(_) => "a list".into(),
        Value::String(text) if text.chars().count() > LONGEST => {
            format!("\"{}...\"", text.chars().take(LONGEST).collect::<String>())
        }
        scalar => scalar.to_string(),
    }
}

fn flag(schema: &Value, name: &str) -> bool {
    schema[name] == true
}

fn entries<'a>(schema: &'a Value, name: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    schema[name].as_object().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn messages(schema: &Value, value: &Value) -> Vec<String> {
        check(schema, value).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn values_are_held_against_the_schema() {
        let number = json!({"type": "number", "minimum": 0.0, "maximum": 0.5});
        let count = json!({"type": "integer", "format": "int32"});
        let mode = json!({"type": "string", "enum": ["Sync", "Async"]});
        let args = json!({"type": "array", "items": {"type": "string"}, "maxItems": 2});
        let port = json!({"x-kubernetes-int-or-string": true});
        let name = json!({"type": "string", "minLength": 1, "maxLength": 3});
        let rows = [
            (&number, json!(0.5), ""),
            (&number, json!(0.6), "x is 0.6; write a number from 0 to 0.5"),
            (&number, json!("0.1"), "x is \"0.1\"; write it without quotes: 0.1"),
            (&number, json!(null), "x is empty; write a number from 0 to 0.5"),
            (&count, json!(2), ""),
            (&count, json!(2.5), "x is 2.5; write a whole number"),
            (&count, json!(1_u64 << 40), "x is 1099511627776; write a whole number"),
            (&mode, json!("async"), "x is \"async\"; write Sync or Async"),
            (&args, json!(["a", 3]), "x[1] is 3; write it in quotes: \"3\""),
            (&args, json!("train mnist"), "x is \"train mnist\"; write a list: [train, mnist]"),
            (&args, json!(["a", "b", "c"]), "x has 3 entries; write at most 2"),
            (&port, json!("http"), ""),
            (&port, json!(true), "x is true; write a whole number or text"),
            (&name, json!(""), "x has 0 characters; write 1 to 3"),
        ];
        for (schema, value, want) in rows {
            let schema = json!({"type": "object", "properties": {"x": schema}});
            let found = messages(&schema, &json!({"x": value}));
            let want: Vec<_> = Some(want).filter(|want| !want.is_empty()).into_iter().collect();
            assert_eq!(found, want, "{value}");
        }
    }

    #[test]
    fn all_problems_of_an_object_are_reported_at_once() {
        let schema = json!({
            "type": "object",
            "required": ["a", "b"],
            "properties": {"a": {"type": "boolean"}, "b": {"type": "object", "required": ["c"]}, "replicas": {}},
        });
        let want = [
            "replica is no known field; did you mean replicas?",
            "a is missing; write true or false",
            "b is missing; write a mapping with c",
        ];
        assert_eq!(messages(&schema, &json!({"replica": 1})), want);
    }

    #[test]
    fn defaults_reach_into_what_is_there_and_what_is_not() {
        let schema = json!({"properties": {
            "a": {"default": {}, "properties": {"b": {"default": 1}, "n": {"default": 2, "nullable": true}}},
            "list": {"items": {"properties": {"c": {"default": 3}}}},
        }});
        let mut value = json!({"a": {"b": null, "n": null}, "list": [{}, {"c": 4}]});
        fill_defaults(&schema, &mut value);
        assert_eq!(value, json!({"a": {"b": 1, "n": null}, "list": [{"c": 3}, {"c": 4}]}));
        let mut value = json!({});
        fill_defaults(&schema, &mut value);
        assert_eq!(value, json!({"a": {"b": 1, "n": 2}}));
    }
}
