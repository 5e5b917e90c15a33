//! Lines of several sources in the order of their times.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use jiff::Timestamp;

/// Merges sources whose own lines come in order. A line comes out when no source can bring an earlier one any more: each
/// open source has a line that waits. Where sources are followed, a line waits for silent ones for a while only.
pub struct Merge<T> {
    hold: Option<Duration>,
    sources: HashMap<usize, Source<T>>,
    /// The first line of each source that has one, by time.
    first: BTreeSet<(Timestamp, usize)>,
    /// Open sources without a line.
    silent: usize,
}

struct Source<T> {
    open: bool,
    lines: VecDeque<(Timestamp, Instant, T)>,
    newest: Timestamp,
}

impl<T> Merge<T> {
    /// Waits at most `hold` for silent sources; for ever without it.
    pub fn new(hold: Option<Duration>) -> Self {
        Self { hold, sources: HashMap::new(), first: BTreeSet::new(), silent: 0 }
    }

    /// From now on the source may bring lines.
    pub fn open(&mut self, source: usize) {
        let new = Source { open: true, lines: VecDeque::new(), newest: Timestamp::MIN };
        if self.sources.insert(source, new).is_none() {
            self.silent += 1;
        }
    }

    /// The source has brought its last line.
    pub fn close(&mut self, source: usize) {
        if let Some(found) = self.sources.get_mut(&source)
            && found.open
        {
            found.open = false;
            if found.lines.is_empty() {
                self.silent -= 1;
                self.sources.remove(&source);
            }
        }
    }

    /// The source brings a line, at `now`. A time before that of its line before counts as that one.
    pub fn push(&mut self, source: usize, time: Timestamp, now: Instant, line: T) {
        let Some(found) = self.sources.get_mut(&source) else { return };
        let time = time.max(found.newest);
        found.newest = time;
        if found.lines.is_empty() {
            self.first.insert((time, source));
            self.silent -= usize::from(found.open);
        }
        found.lines.push_back((time, now, line));
    }

    /// The next line, if it must wait for none.
    pub fn next(&mut self, now: Instant) -> Option<T> {
        let &(time, source) = self.first.first()?;
        let found = self.sources.get_mut(&source)?;
        if self.silent > 0 && self.hold.is_none_or(|hold| found.lines.front().is_some_and(|line| now < line.1 + hold)) {
            return None;
        }
        self.first.remove(&(time, source));
        let (_, _, line) = found.lines.pop_front()?;
        match found.lines.front() {
            Some(&(time, ..)) => {
                self.first.insert((time, source));
            }
            None if found.open => self.silent += 1,
            None => {
                self.sources.remove(&source);
            }
        }
        Some(line)
    }

    /// When `next` has a line although sources are silent.
    pub fn due(&self) -> Option<Instant> {
        let &(_, source) = self.first.first()?;
        Some(self.sources.get(&source)?.lines.front()?.1 + self.hold?)
    }

    /// No source is open, and no line waits.
    pub fn is_over(&self) -> bool {
        self.sources.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    fn all(merge: &mut Merge<&'static str>, now: Instant) -> Vec<&'static str> {
        std::iter::from_fn(|| merge.next(now)).collect()
    }

    #[test]
    fn lines_come_out_by_time_when_no_earlier_one_can_come() {
        let now = Instant::now();
        let mut merge = Merge::new(None);
        merge.open(0);
        merge.open(1);
        merge.push(0, at(1), now, "a1");
        merge.push(0, at(3), now, "a3");
        assert!(all(&mut merge, now).is_empty(), "the other source is silent");
        merge.push(1, at(2), now, "b2");
        assert_eq!(all(&mut merge, now), ["a1", "b2"], "b may bring a line before a3");
        merge.close(1);
        assert_eq!(all(&mut merge, now), ["a3"]);
        assert!(!merge.is_over());
        merge.close(0);
        assert!(merge.is_over());
    }

    #[test]
    fn the_lines_of_a_hundred_pods_are_complete_and_in_order() {
        let (pods, of_each, part) = (100, 200, 20);
        let now = Instant::now();
        for hold in [None, Some(Duration::from_millis(300))] {
            let mut merge = Merge::new(hold);
            (0..pods).for_each(|pod| merge.open(pod));
            let mut seen = Vec::new();
            for begin in (0..of_each).step_by(part) {
                // In an order of their own each time, so that those that come first wait for the last.
                for place in 0..pods {
                    let pod = (place * 37 + begin) % pods;
                    for line in begin..begin + part {
                        let number = line * pods + (pod + line) % pods;
                        let time = Timestamp::from_nanosecond(number as i128).expect("in range");
                        merge.push(pod, time, now, number);
                    }
                    seen.extend(std::iter::from_fn(|| merge.next(now)));
                }
            }
            (0..pods).for_each(|pod| merge.close(pod));
            seen.extend(std::iter::from_fn(|| merge.next(now)));
            assert!(seen.iter().copied().eq(0..pods * of_each), "{} lines", seen.len());
            assert!(merge.is_over());
        }
    }

    #[test]
    fn a_followed_line_waits_for_silent_sources_for_a_while() {
        let now = Instant::now();
        let hold = Duration::from_millis(300);
        let mut merge = Merge::new(Some(hold));
        merge.open(0);
        merge.open(1);
        merge.push(0, at(5), now, "a5");
        assert!(all(&mut merge, now).is_empty());
        assert_eq!(merge.due(), Some(now + hold));
        merge.push(1, at(4), now + hold / 2, "b4");
        assert_eq!(all(&mut merge, now + hold / 2), ["b4"]);
        assert_eq!(all(&mut merge, now + hold), ["a5"]);
        assert_eq!(merge.due(), None);
    }

    #[test]
    fn a_source_that_goes_back_in_time_keeps_its_own_order() {
        let now = Instant::now();
        let mut merge = Merge::new(None);
        merge.open(0);
        merge.push(0, at(9), now, "first");
        merge.push(0, at(2), now, "second");
        merge.close(0);
        assert_eq!(all(&mut merge, now), ["first", "second"]);
        assert!(merge.is_over());
    }

    #[test]
    fn what_comes_of_a_closed_source_is_left_out() {
        let mut merge = Merge::new(None);
        merge.open(0);
        merge.close(0);
        merge.close(0);
        merge.push(0, at(1), Instant::now(), "late");
        assert!(merge.is_over() && merge.next(Instant::now()).is_none());
    }
}
