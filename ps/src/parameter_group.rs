//! The parameter groups of a job's tensors, by name, and where their elements lie in the flat space.

use psjobs_api::training::OptimizerGroup;
use psjobs_arithmetic::parameter_group::{ParameterGroup, Stretch};

use crate::layout::TensorSpec;

/// Returns the tensors in the job's `groups`, by name: the first that matches holds. A tensor without one stays as it is.
#[must_use]
pub fn in_groups(mut tensors: Vec<TensorSpec>, groups: &[OptimizerGroup]) -> Vec<TensorSpec> {
    for tensor in &mut tensors {
        if let Some(group) = groups.iter().find(|group| group.matches(&tensor.name)) {
            let OptimizerGroup { learning_rate_factor, weight_decay, .. } = *group;
            tensor.group = ParameterGroup { learning_rate_factor, weight_decay };
        }
    }
    tensors
}

/// Warns of groups that no tensor is in, which are mostly misspelt.
pub(crate) fn warn_of_empty(groups: &[OptimizerGroup], tensors: &[TensorSpec]) {
    for OptimizerGroup { parameters, .. } in
        groups.iter().filter(|group| !tensors.iter().any(|tensor| group.matches(&tensor.name)))
    {
        let names: Vec<&str> = tensors.iter().take(8).map(|tensor| tensor.name.as_str()).collect();
        tracing::warn!(
            "spec.training.optimizer.groups: no parameter of the model has a name like {parameters:?}; the first names are {}",
            names.join(", ")
        );
    }
}

/// Returns the groups of the flat space of `tensors`, in order and without gaps. Neighbours of one group are one stretch,
/// so that a model without groups is a single one.
#[must_use]
pub fn stretches(tensors: &[TensorSpec]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.elements().unwrap_or(0);
        match stretches.last_mut() {
            Some(last) if last.group == tensor.group => last.range.end = end,
            _ if end == start => {}
            _ => stretches.push(Stretch { range: start..end, group: tensor.group }),
        }
        start = end;
    }
    stretches
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use psjobs_arithmetic::parameter_group::within;

    use super::*;

    #[test]
    fn the_first_group_that_matches_holds() {
        let groups =
            [("*.bias", 1.0, Some(0.0)), ("head.*", 0.1, None)].map(|(name, learning_rate_factor, weight_decay)| {
                OptimizerGroup { parameters: name.into(), learning_rate_factor, weight_decay }
            });
        let tensors = ["head.bias", "head.weight", "body.weight"].map(|name| TensorSpec::new(name, vec![1]));
        let found = in_groups(tensors.into(), &groups).into_iter().map(|tensor| tensor.group);
        let group = |learning_rate_factor, weight_decay| ParameterGroup { learning_rate_factor, weight_decay };
        assert_eq!(found.collect::<Vec<_>>(), [group(1.0, Some(0.0)), group(0.1, None), ParameterGroup::default()]);
    }

    fn group(factor: u8) -> ParameterGroup {
        ParameterGroup { learning_rate_factor: f64::from(factor), weight_decay: None }
    }

    proptest! {
        #[test]
        fn every_element_of_every_block_has_the_group_of_its_tensor(
            tensors in proptest::collection::vec((0_u64..20, 0_u8..3), 1..12),
            length in 1_usize..30,
        ) {
            let by_element: Vec<u8> = tensors.iter().flat_map(|(size, group)| vec![*group; *size as usize]).collect();
            let tensor = |(size, factor): &(u64, u8)| {
                TensorSpec { group: group(*factor), ..TensorSpec::new("w", vec![*size]) }
            };
            let all = stretches(&tensors.iter().map(tensor).collect::<Vec<_>>());
            prop_assert!(all.windows(2).all(|pair| pair[0].group != pair[1].group), "neighbours are one");
            for (number, expected) in by_element.chunks(length).enumerate() {
                let start = number * length;
                let found = within(&all, &(start..start + expected.len()));
                let mut next = 0;
                for Stretch { range, group: found } in found {
                    prop_assert_eq!(range.start, next);
                    next = range.end;
                    prop_assert!(expected[range].iter().all(|factor| group(*factor) == found));
                }
                prop_assert_eq!(next, expected.len());
            }
        }
    }
}
