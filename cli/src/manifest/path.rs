//! Where a field is in a manifest: `spec.trainer.template.spec.containers[0].args[2]`.

use std::fmt;

/// One step down into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Key(String),
    Index(usize),
}

/// The way from a document's root to a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldPath(Vec<Step>);

impl FieldPath {
    pub fn key(&self, name: &str) -> Self {
        self.with(Step::Key(name.to_owned()))
    }

    pub fn index(&self, index: usize) -> Self {
        self.with(Step::Index(index))
    }

    fn with(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }

    pub fn parent(&self) -> Option<Self> {
        let (_, above) = self.0.split_last()?;
        Some(Self(above.to_vec()))
    }

    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    /// Reads `spec.training.optimizer`, the spelling of the field paths in rules; without indexes.
    pub fn parse(dotted: &str) -> Self {
        Self(dotted.split('.').filter(|name| !name.is_empty()).map(|name| Step::Key(name.to_owned())).collect())
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (depth, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                // Label names hold dots themselves.
                Step::Key(name) if name.contains('.') => write!(f, "[{name}]")?,
                Step::Key(name) if depth == 0 => f.write_str(name)?,
                Step::Key(name) => write!(f, ".{name}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_written_as_kubernetes_writes_them() {
        let path = FieldPath::parse("spec.trainer").key("labels").key("psjobs.dev/role").key("args").index(2);
        assert_eq!(path.to_string(), "spec.trainer.labels[psjobs.dev/role].args[2]");
        assert_eq!(FieldPath::default().to_string(), "");
        assert_eq!(FieldPath::parse("spec.ps").parent(), Some(FieldPath::parse("spec")));
    }
}
