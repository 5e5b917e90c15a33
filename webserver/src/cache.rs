//! Answers that are kept for a while. The time is passed in.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Answers by question.
#[derive(Debug)]
pub struct Cache<K, V> {
    kept: HashMap<K, (Instant, V)>,
    lifetime: Duration,
    most: usize,
}

impl<K: Eq + Hash, V: Clone> Cache<K, V> {
    /// An empty cache, which keeps at most `most` answers for `lifetime`.
    pub fn new(lifetime: Duration, most: usize) -> Self {
        Self { kept: HashMap::new(), lifetime, most }
    }

    /// Returns the answer, if it is young enough.
    pub fn get(&self, question: &K, now: Instant) -> Option<V> {
        let (since, answer) = self.kept.get(question)?;
        (now.saturating_duration_since(*since) < self.lifetime).then(|| answer.clone())
    }

    /// Keeps an answer. Where there are too many, the old ones go, and all if all are young.
    pub fn put(&mut self, question: K, answer: V, now: Instant) {
        if self.kept.len() >= self.most {
            self.kept.retain(|_, (since, _)| now.saturating_duration_since(*since) < self.lifetime);
            if self.kept.len() >= self.most {
                self.kept.clear();
            }
        }
        self.kept.insert(question, (now, answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_kept_for_its_lifetime() {
        let (mut cache, began) = (Cache::new(Duration::from_secs(60), 10), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        cache.put("a", true, after(0));
        for (seconds, wanted) in [(0, Some(true)), (59, Some(true)), (60, None), (600, None)] {
            assert_eq!(cache.get(&"a", after(seconds)), wanted, "after {seconds} s");
        }
        assert_eq!(cache.get(&"b", after(0)), None);
        cache.put("a", false, after(70));
        assert_eq!(cache.get(&"a", after(71)), Some(false));
    }

    #[test]
    fn a_cache_is_bounded() {
        let (mut cache, began) = (Cache::new(Duration::from_secs(60), 2), Instant::now());
        let after = |seconds| began + Duration::from_secs(seconds);
        cache.put(1, 1, after(0));
        cache.put(2, 2, after(50));
        cache.put(3, 3, after(70));
        assert_eq!((cache.get(&1, after(70)), cache.get(&2, after(70))), (None, Some(2)), "the old one went");
        cache.put(4, 4, after(71));
        assert_eq!((cache.kept.len(), cache.get(&4, after(71))), (1, Some(4)));
    }
}
