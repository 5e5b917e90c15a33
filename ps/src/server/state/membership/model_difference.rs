//! Says how the tensors of two models differ.

use std::collections::BTreeSet;

use psjobs_arithmetic::parameter_group::ParameterGroup;

use crate::layout::TensorSpec;

/// Tensors that a list names; a model may have thousands.
const NAMED: usize = 24;

/// Returns in which tensors the model of `other` differs from the job's, `None` if it does not: the tensors that only one
/// of them has, with their shapes, or the first that stands elsewhere or is in another parameter group.
pub fn difference(job: &[TensorSpec], tensors: &[TensorSpec], other: &str) -> Option<String> {
    if job == tensors {
        return None;
    }
    let only = |those: &[TensorSpec], without: &[TensorSpec]| {
        let known: BTreeSet<_> = without.iter().map(|t| (&t.name, &t.shape)).collect();
        let only: Vec<String> = (those.iter().filter(|t| !known.contains(&(&t.name, &t.shape))))
            .map(|t| format!("{} {:?}", t.name, t.shape))
            .collect();
        let more = only.len().saturating_sub(NAMED);
        let named = only[..only.len() - more].join(", ");
        match (only.is_empty(), more) {
            (true, _) => "nothing".to_owned(),
            (false, 0) => named,
            (false, more) => format!("{named} and {more} more"),
        }
    };
    let (here, there) = (only(job, tensors), only(tensors, job));
    if (here.as_str(), there.as_str()) == ("nothing", "nothing") {
        let first = job.iter().zip(tensors).position(|(one, another)| one != another);
        if let Some(first) = first.filter(|first| job[*first].name == tensors[*first].name) {
            let describe = |tensor: &TensorSpec| {
                let ParameterGroup { learning_rate_factor, weight_decay } = tensor.group;
                let decay = weight_decay
                    .map_or_else(|| "the job's weight decay".into(), |decay| format!("weight decay {decay}"));
                format!("{learning_rate_factor} times the job's learning rate and {decay}")
            };
            let (name, here, there) = (&job[first].name, describe(&job[first]), describe(&tensors[first]));
            return Some(format!("the parameter group of {name}: in the job it has {here}, in {other} {there}"));
        }
        let name = |those: &[TensorSpec]| first.and_then(|i| those.get(i)).map_or_else(String::new, |t| t.name.clone());
        let (place, here, there) = (first.unwrap_or(job.len()), name(job), name(tensors));
        return Some(format!("the order of tensors: number {place} is {here} in the job and {there} in {other}"));
    }
    Some(format!("only the job has {here}; only {other} has {there}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(of: &[(&str, u64)]) -> Vec<TensorSpec> {
        of.iter().map(|(name, size)| TensorSpec::new(*name, vec![*size])).collect()
    }

    #[test]
    fn both_lists_are_described() {
        let job = tensors(&[("w", 6), ("b", 3)]);
        let rows = [
            (tensors(&[("w", 6), ("b", 3)]), None),
            (tensors(&[("w", 6), ("b", 4)]), Some("only the job has b [3]; only trainer 1 has b [4]")),
            (tensors(&[("w", 6)]), Some("only the job has b [3]; only trainer 1 has nothing")),
            (tensors(&[("w", 6), ("b", 3), ("c", 1)]), Some("only the job has nothing; only trainer 1 has c [1]")),
            (tensors(&[("b", 3), ("w", 6)]), Some("the order of tensors: number 0 is w in the job and b in trainer 1")),
        ];
        let mut other_group = job.clone();
        other_group[1].group = ParameterGroup { learning_rate_factor: 0.5, weight_decay: Some(0.0) };
        let group = "the parameter group of b: in the job it has 1 times the job's learning rate and the job's weight decay, in \
                     trainer 1 0.5 times the job's learning rate and weight decay 0";
        for (found, want) in rows.into_iter().chain([(other_group, Some(group))]) {
            assert_eq!(difference(&job, &found, "trainer 1").as_deref(), want);
        }
    }

    #[test]
    fn a_long_list_is_cut() {
        let many: Vec<TensorSpec> = (0..1000).map(|i| TensorSpec::new(format!("t{i}"), vec![1])).collect();
        let message = difference(&many, &[], "the checkpoint").expect("they differ");
        assert!(message.contains("t23 [1] and 976 more") && !message.contains("t24"), "{message}");
    }
}
