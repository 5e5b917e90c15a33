//! Lists of replica indexes as text: `0-2,5`.

/// No replica has a higher index.
const HIGHEST_INDEX: u32 = 4095;

/// Formats `[0, 1, 2, 5]` as `0-2,5`. `indexes` is sorted.
#[must_use]
pub fn format(indexes: &[u32]) -> String {
    let runs = indexes.chunk_by(|a, b| a + 1 == *b);
    let text = runs.map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => unreachable!("chunk_by yields no empty run"),
    });
    text.collect::<Vec<_>>().join(",")
}

/// Parses the text of [`format()`]. Leaves out text that is no range, and indexes that no replica has.
pub fn parse(text: &str) -> impl Iterator<Item = u32> {
    text.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<u32>(), last.parse::<u32>()) {
            (Ok(first), Ok(last)) => first..last.min(HIGHEST_INDEX) + 1,
            _ => 0..0,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{format, parse};

    #[test]
    fn indexes_are_written_as_ranges() {
        for (members, text) in [(vec![], ""), (vec![3], "3"), (vec![0, 1, 2, 5], "0-2,5"), (vec![0, 2, 3], "0,2-3")] {
            assert_eq!(format(&members), text);
            assert_eq!(parse(text).collect::<Vec<_>>(), members);
        }
        assert_eq!(parse("x,7,9-y,2-999999999").count(), 1 + 4094, "garbage is left out, ranges are bounded");
    }
}
