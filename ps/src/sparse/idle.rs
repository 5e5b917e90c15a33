//! When rows have been unused for too long. A row remembers when it was used as a count of requests; here
//! is what that count was at which time, in steps or in milliseconds.

use std::collections::VecDeque;

/// Marks kept for one limit: a row goes at most an eighth of the limit late.
const MARKS: u64 = 8;

/// One limit of a table.
#[derive(Clone, Debug)]
pub struct Idle {
    limit: u64,
    /// Times, ascending, each with the count of requests then.
    marks: VecDeque<(u64, u64)>,
}

impl Idle {
    /// Rows go when they were unused for `limit`; `None` for 0, which is no limit.
    pub fn new(limit: u64) -> Option<Self> {
        (limit > 0).then(|| Self { limit, marks: VecDeque::new() })
    }

    /// It is `time`, and `requests` have been: the count up to which rows are to go, if there is news.
    pub fn observe(&mut self, time: u64, requests: u64) -> Option<u64> {
        let due = |(last, _): &(u64, u64)| time >= last + (self.limit / MARKS).max(1);
        if self.marks.back().is_none_or(due) {
            self.marks.push_back((time, requests));
        }
        let mut until = None;
        while let Some((_, requests)) = self.marks.pop_front_if(|(then, _)| *then + self.limit <= time) {
            until = Some(requests);
        }
        until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_after_the_limit_and_not_much_later() {
        assert!(Idle::new(0).is_none());
        let mut idle = Idle::new(80).expect("a limit");
        // One request at each time: the count is the time plus 1000.
        let mut gone = 0;
        for time in 0..1000 {
            if let Some(until) = idle.observe(time, time + 1000) {
                let last_use = until - 1000;
                assert!(time - last_use >= 80, "at {time} rows of {last_use} went");
                gone = last_use;
            }
            assert!(time < 90 || time - gone <= 90, "at {time} only rows up to {gone} have gone");
        }
    }

    #[test]
    fn a_long_silence_ends_in_one_eviction() {
        let mut idle = Idle::new(8).expect("a limit");
        for time in 0..8 {
            assert_eq!(idle.observe(time, time), None);
        }
        assert_eq!(idle.observe(100, 8), Some(7), "what was used at the end of that, and not since");
        assert_eq!(idle.observe(101, 9), None);
    }
}
