//! Guesses what was meant by a field that does not exist.

use serde_json::Value;

use super::path::FieldPath;

/// How many field names a sentence may list.
const SHORT_LIST: usize = 12;

/// How many places of a field a sentence may name.
const MOST_PLACES: usize = 3;

/// Advice for a name that an object's `schema` does not have: a field there that is spelt alike, a
/// field of that name elsewhere in the job (`root`), or what there is to choose from.
pub fn did_you_mean(name: &str, schema: &Value, root: &Value) -> String {
    let siblings: Vec<_> = names(schema).collect();
    if let Some(alike) = closest(name, siblings.iter().copied()) {
        return format!("did you mean {alike}?");
    }
    let elsewhere = elsewhere(name, root, &FieldPath::default());
    if !elsewhere.is_empty() {
        return format!("did you mean {}?", elsewhere[..elsewhere.len().min(MOST_PLACES)].join(" or "));
    }
    if siblings.len() <= SHORT_LIST {
        format!("known here: {}", siblings.join(", "))
    } else {
        "remove it, or look at its spelling with `kubectl explain`".into()
    }
}

/// The candidate that is spelt most like `name`, if one is near enough to be meant.
pub fn closest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let distance = |candidate: &str| strsim::damerau_levenshtein(&lower, &candidate.to_lowercase());
    let (distance, candidate) = candidates.into_iter().map(|candidate| (distance(candidate), candidate)).min()?;
    (distance <= (name.len() / 3).clamp(1, 3)).then_some(candidate)
}

/// Returns the fields of this name in the job's own part of the schema. Pod templates have a field for nearly every word, so
/// they are left out.
fn elsewhere(name: &str, schema: &Value, path: &FieldPath) -> Vec<String> {
    let below = names(schema).filter(|below| !["template", "status", "metadata"].contains(below));
    let paths = below.map(|below| (below, path.key(below)));
    let places = paths.map(|(below, path)| match below.eq_ignore_ascii_case(name) {
        true => vec![path.to_string()],
        false => elsewhere(name, &schema["properties"][below], &path),
    });
    places.flatten().collect()
}

fn names(schema: &Value) -> impl Iterator<Item = &str> {
    schema["properties"].as_object().into_iter().flat_map(|properties| properties.keys().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_guess_is_the_nearest_field_or_where_the_field_is() {
        let spec = json!({"properties": {
            "replicas": {},
            "gpus": {},
            "training": {"properties": {
                "local": {"properties": {"steps": {}, "learningRate": {}}},
                "optimizer": {"properties": {"learningRate": {}}},
            }},
            "template": {"properties": {"momentum": {}}},
        }});
        let rows = [
            ("replica", "did you mean replicas?"),
            ("Replicas", "did you mean replicas?"),
            ("gpu", "did you mean gpus?"),
            ("learningRate", "did you mean training.local.learningRate or training.optimizer.learningRate?"),
            ("steps", "did you mean training.local.steps?"),
            ("momentum", "known here: gpus, replicas, template, training"),
        ];
        for (name, want) in rows {
            assert_eq!(did_you_mean(name, &spec, &spec), want, "{name}");
        }
    }
}
