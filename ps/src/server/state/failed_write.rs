//! Checkpoints that cannot be written: since when, and why.

/// The checkpoints of a job cannot be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedWrite {
    /// The time of the first write that failed, in seconds since 1970, by the clock of the disk. It is shown and never compared.
    pub unix_seconds: u64,
    /// The fault, in the words of the disk or the store, and what to do about it.
    why: String,
}

impl FailedWrite {
    /// Returns the fault after a write has failed at `unix_seconds` because of `why`, if none has succeeded since the `known`
    /// one. Its time stays, and so do its words while the cause is the same: they are shown to people once.
    #[must_use]
    pub fn after(known: Option<Self>, why: &str, unix_seconds: u64) -> Self {
        match known {
            Some(known) if is_same_cause(&known.why, why) => known,
            Some(known) => Self { why: why.to_owned(), ..known },
            None => Self { unix_seconds, why: why.to_owned() },
        }
    }

    /// Returns a sentence about it.
    #[must_use]
    pub fn sentence(&self) -> String {
        format!("no checkpoint can be written: {}; training goes on, and the next one is tried at its time", self.why)
    }
}

/// Returns whether two sentences differ in nothing but words with digits: steps, times, numbers of attempts and of requests,
/// which a client of a store says anew each time.
#[must_use]
pub fn is_same_cause(one: &str, other: &str) -> bool {
    let words = |text| str::split_whitespace(text).filter(|word| !word.bytes().any(|byte| byte.is_ascii_digit()));
    words(one).eq(words(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_change_with_the_cause_and_the_time_stays() {
        let first = "cannot write s3://bucket/run-00001/step-000000000007 (503 SlowDown after 9 retries in 30.1s)";
        for (label, why, want) in [
            (
                "another step and other numbers",
                "cannot write s3://bucket/run-00001/step-000000000009 (503 SlowDown after 12 retries in 30.4s)",
                first,
            ),
            (
                "another cause",
                "cannot write s3://bucket/run-00001/x (403 AccessDenied after 1 retries in 0.1s)",
                "cannot write s3://bucket/run-00001/x (403 AccessDenied after 1 retries in 0.1s)",
            ),
        ] {
            let known = FailedWrite::after(None, first, 5);
            let after = FailedWrite::after(Some(known), why, 65);
            assert_eq!(after, FailedWrite { unix_seconds: 5, why: want.to_owned() }, "{label}");
            assert!(after.sentence().contains(want) && after.sentence().contains("training goes on"), "{label}");
        }
    }
}
