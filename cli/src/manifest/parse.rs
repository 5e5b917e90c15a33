//! From YAML text to JSON values, the way kubectl reads a file: several documents, anchors and merge
//! keys, and numbers such as `2.0` that are whole.

use serde::Deserialize as _;
use serde_json::{Map, Number, Value};
use serde_yaml::Value as Yaml;

use super::path::FieldPath;
use super::{Finding, Problem};

/// One document that is not empty.
#[derive(Debug)]
pub struct Document {
    /// Place in the text, from 0, empty documents counted.
    pub place: usize,
    pub value: Value,
}

/// Reads all documents up to the first that cannot be read.
pub fn documents(text: &str) -> (Vec<Document>, Option<Problem>) {
    let mut documents = Vec::new();
    for (place, reader) in serde_yaml::Deserializer::from_str(text).enumerate() {
        let yaml = Yaml::deserialize(reader).and_then(|mut yaml| yaml.apply_merge().map(|()| yaml));
        let yaml = match yaml {
            Ok(yaml) => yaml,
            Err(error) => return (documents, Some(syntax_problem(text, &error))),
        };
        match json(&yaml, &FieldPath::default()) {
            Ok(Value::Null) => {}
            Ok(value) => documents.push(Document { place, value }),
            Err(finding) => return (documents, Some(finding.locate(text, place))),
        }
    }
    (documents, None)
}

fn syntax_problem(text: &str, error: &serde_yaml::Error) -> Problem {
    let line = error.location().map(|location| text_line(text, location.line()));
    let source = line.and_then(|line| text.lines().nth(line.saturating_sub(1))).unwrap_or_default();
    let indent = source.len() - source.trim_start().len();
    let advice = if source[..indent].contains('\t') {
        "indent with spaces, YAML allows no tabs"
    } else if error.to_string().contains("duplicate entry") {
        "write the field once"
    } else {
        "look at the indentation, the colons and the quotes of this line and the one before"
    };
    Problem { line, field: String::new(), message: format!("not valid YAML: {error}; {advice}") }
}

/// Converts a line number of the YAML reader to one of the text as editors count it, both from 1. YAML 1.1
/// also ends a line at a lone carriage return, NEL (U+0085), LS (U+2028) and PS (U+2029); an editor
/// ends it at a line feed only.
pub fn text_line(text: &str, yaml_line: usize) -> usize {
    let mut line = 1;
    let mut breaks = 0;
    let mut characters = text.chars().peekable();
    while breaks + 1 < yaml_line
        && let Some(character) = characters.next()
    {
        let ends_line = match character {
            '\r' => characters.peek() != Some(&'\n'),
            '\n' | '\u{85}' | '\u{2028}' | '\u{2029}' => true,
            _ => false,
        };
        breaks += usize::from(ends_line);
        line += usize::from(character == '\n');
    }
    line
}

/// Converts a value; refuses what JSON, and so Kubernetes, cannot hold.
fn json(yaml: &Yaml, path: &FieldPath) -> Result<Value, Finding> {
    Ok(match yaml {
        Yaml::Null => Value::Null,
        Yaml::Bool(truth) => Value::Bool(*truth),
        Yaml::String(text) => Value::String(text.clone()),
        Yaml::Number(number) => Value::Number(json_number(number, path)?),
        Yaml::Sequence(items) => {
            let items = items.iter().enumerate().map(|(index, item)| json(item, &path.index(index)));
            Value::Array(items.collect::<Result<_, _>>()?)
        }
        Yaml::Mapping(entries) => {
            let mut object = Map::new();
            for (key, value) in entries {
                let key = match key {
                    Yaml::String(key) => key.clone(),
                    Yaml::Number(key) => key.to_string(),
                    Yaml::Bool(key) => key.to_string(),
                    _ => return Err(Finding::new(path, format!("{path} has a key that is not text; write text"))),
                };
                let value = json(value, &path.key(&key))?;
                object.insert(key, value);
            }
            Value::Object(object)
        }
        Yaml::Tagged(tagged) => {
            let tag = &tagged.tag;
            return Err(Finding::new(path, format!("{path} has the tag {tag}; Kubernetes knows no tags, remove it")));
        }
    })
}

fn json_number(number: &serde_yaml::Number, path: &FieldPath) -> Result<Number, Finding> {
    if let Some(number) = number.as_i64() {
        return Ok(number.into());
    }
    if let Some(number) = number.as_u64() {
        return Ok(number.into());
    }
    let float = number.as_f64().unwrap_or(f64::NAN);
    // Up to 2^53 every whole float is that whole number.
    if float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0 {
        return Ok((float as i64).into());
    }
    Number::from_f64(float).ok_or_else(|| Finding::new(path, format!("{path} is {number}; write a finite number")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_are_read_as_kubectl_reads_them() {
        let text = "---\n# nothing\n---\nbase: &base {a: 1, b: 2.0}\n---\nx: {<<: {a: 1}, b: 1e-8}\n1: one\n";
        let (documents, problem) = documents(text);
        assert_eq!(problem, None);
        let found: Vec<_> = documents.into_iter().map(|document| (document.place, document.value)).collect();
        let want = [(1, json!({"base": {"a": 1, "b": 2}})), (2, json!({"x": {"a": 1, "b": 1e-8}, "1": "one"}))];
        assert_eq!(found, want);
    }

    #[test]
    fn a_line_is_counted_as_an_editor_counts_it() {
        let text = "a: 1\r\nb: 2\rc: 3\nd: \"\u{85}\u{2028}\u{2029}\"\ne: 5\n";
        let rows = [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 3), (8, 4), (9, 5), (100, 5)];
        for (yaml_line, line) in rows {
            assert_eq!(text_line(text, yaml_line), line, "line {yaml_line} of the YAML reader");
        }
    }

    #[test]
    fn what_cannot_be_read_is_reported_with_its_line() {
        let rows = [
            ("a: 1\n\tb: 2\n", 2, "no tabs"),
            ("a: 1\nb: [1, 2\n", 3, "look at the indentation"),
            ("a: 1\na: 2\n", 1, "write the field once"),
            ("a: 1\nb: .nan\n", 2, "b is .nan; write a finite number"),
            ("a: !thing 1\n", 1, "a has the tag !thing"),
            ("a: \"\u{85}\u{2028}\r\u{2029}\"\nb: {\n", 3, "look at the indentation"),
            ("a: \"\u{85}\u{2028}\"\nb: .nan\n", 2, "b is .nan; write a finite number"),
        ];
        for (text, line, want) in rows {
            let problem = documents(text).1.expect(text);
            assert_eq!(problem.line, Some(line), "{text:?}: {problem:?}");
            assert!(problem.message.contains(want), "{text:?}: {}", problem.message);
        }
    }
}
