//! `$(NAME)` in a container's command, arguments and variables, as the kubelet expands it.

use std::collections::BTreeMap;

/// Replaces `$(NAME)` by the variable's value. `$$` stands for one `$`; a name that is not known stays
/// as it is written.
pub fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        expanded.push_str(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        let reference = after.strip_prefix('(').and_then(|name| name.split_once(')'));
        rest = if let Some(after) = after.strip_prefix('$') {
            expanded.push('$');
            after
        } else if let Some((name, after)) = reference {
            match variables.get(name) {
                Some(value) => expanded.push_str(value),
                None => expanded.push_str(&format!("$({name})")),
            }
            after
        } else {
            expanded.push('$');
            after
        };
    }
    expanded + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_expanded_as_the_kubelet_does() {
        let variables = [("RANK".to_owned(), "2".to_owned()), ("A".to_owned(), "$(RANK)".to_owned())].into();
        for (text, want) in [
            ("rank=$(RANK)/$(RANK)", "rank=2/2"),
            ("$(NONE) $RANK ${RANK}", "$(NONE) $RANK ${RANK}"),
            ("$$(RANK) $$", "$(RANK) $"),
            ("$(A)", "$(RANK)"),
            ("$(RANK", "$(RANK"),
            ("five $", "five $"),
            ("", ""),
        ] {
            assert_eq!(expand(text, &variables), want, "{text:?}");
        }
    }
}
