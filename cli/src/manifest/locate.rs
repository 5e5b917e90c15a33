//! Finds the line of a field. The YAML reader reports where it stood when a visitor refused a value,
//! so reading the document again with a visitor that refuses exactly that field gives its line.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::parse::text_line;
use super::path::{FieldPath, Step};

/// Line of a field in one document of a text, counted from 1 over the whole text. A field that is
/// not there has the line of what it is missing in.
pub fn line_of(text: &str, document: usize, path: &FieldPath) -> Option<usize> {
    let mut path = path.clone();
    loop {
        let reader = serde_yaml::Deserializer::from_str(text).nth(document)?;
        if let Some(location) = Seek(path.steps()).deserialize(reader).err().and_then(|error| error.location()) {
            return Some(text_line(text, location.line()));
        }
        path = path.parent()?;
    }
}

/// Goes down the steps and refuses what is at their end.
struct Seek<'a>(&'a [Step]);

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.0.is_empty() { deserializer.deserialize_any(Refuse) } else { deserializer.deserialize_any(self) }
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping or a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((Step::Key(name), below)) = self.0.split_first() else { return drain_map(map) };
        let seek_key = || SeekKey { name, refuse: below.is_empty() };
        while let Some(found) = map.next_key_seed(seek_key())? {
            if found {
                map.next_value_seed(Seek(below))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        if let Some((Step::Index(index), below)) = self.0.split_first() {
            for _ in 0..*index {
                list.next_element::<IgnoredAny>()?;
            }
            list.next_element_seed(Seek(below))?;
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

fn drain_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<(), A::Error> {
    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
    Ok(())
}

/// Compares a key; refuses it if it is the end of the way, because a key is where a field begins.
struct SeekKey<'a> {
    name: &'a str,
    refuse: bool,
}

impl<'de> DeserializeSeed<'de> for SeekKey<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for SeekKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<bool, E> {
        match key == self.name {
            true if self.refuse => Err(E::custom("found")),
            same => Ok(same),
        }
    }
}

/// Refuses whatever it is given.
struct Refuse;

impl<'de> Visitor<'de> for Refuse {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing")
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(A::Error::custom("found"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(A::Error::custom("found"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# a comment
first: document
---
metadata:
  name: mnist
spec:
  ps: {replicas: 1}
  trainer:
    containers:
      - name: trainer
        args:
          - train
          - mnist
      - image: other
";

    #[test]
    fn a_field_is_found_in_its_document_and_a_missing_one_in_its_parent() {
        let containers = FieldPath::parse("spec.trainer.containers");
        let rows = [
            (0, FieldPath::parse("first"), 2),
            (1, FieldPath::parse("metadata.name"), 5),
            (1, FieldPath::parse("spec.ps.replicas"), 7),
            (1, FieldPath::parse("spec.ps.template.spec"), 7),
            (1, containers.index(0).key("args").index(1), 13),
            (1, containers.index(1), 14),
            (1, containers.index(1).key("name"), 14),
            (1, FieldPath::parse("spec.trainer.replicas"), 8),
            (1, FieldPath::parse("kind"), 4),
        ];
        for (document, path, line) in rows {
            assert_eq!(line_of(TEXT, document, &path), Some(line), "{path} in document {document}");
        }
    }
}
