//! Keeps values until there is no more room: the least recently used goes first. Pure.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Values by key, whose costs together are at most a limit.
#[derive(Clone, Debug)]
pub struct Lru<K, V> {
    limit: u64,
    cost: u64,
    /// Counts uses.
    clock: u64,
    values: HashMap<K, Held<V>>,
    /// Keys by their last use.
    order: BTreeMap<u64, K>,
}

#[derive(Clone, Debug)]
struct Held<V> {
    value: V,
    cost: u64,
    used: u64,
}

impl<K: Clone + Eq + Hash, V: Clone> Lru<K, V> {
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { limit, cost: 0, clock: 0, values: HashMap::new(), order: BTreeMap::new() }
    }

    /// Returns the value of a key, which is now the last one that goes.
    pub fn get(&mut self, key: &K) -> Option<V> {
        let held = self.values.get_mut(key)?;
        self.clock += 1;
        self.order.remove(&held.used);
        held.used = self.clock;
        self.order.insert(self.clock, key.clone());
        Some(held.value.clone())
    }

    #[must_use]
    pub fn contains(&self, key: &K) -> bool {
        self.values.contains_key(key)
    }

    /// Keeps a value; others go until there is room. One that costs more than all may together is not kept.
    pub fn put(&mut self, key: K, value: V, cost: u64) {
        self.remove(&key);
        if cost > self.limit {
            return;
        }
        while self.cost + cost > self.limit {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            if let Some(gone) = self.values.remove(&oldest) {
                self.cost -= gone.cost;
            }
        }
        self.clock += 1;
        self.cost += cost;
        self.order.insert(self.clock, key.clone());
        self.values.insert(key, Held { value, cost, used: self.clock });
    }

    pub fn remove(&mut self, key: &K) {
        if let Some(gone) = self.values.remove(key) {
            self.cost -= gone.cost;
            self.order.remove(&gone.used);
        }
    }

    /// Removes the values for which `wanted` returns false.
    pub fn retain(&mut self, wanted: impl Fn(&V) -> bool) {
        let gone: Vec<K> =
            self.values.iter().filter(|(_, held)| !wanted(&held.value)).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| self.remove(key));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut lru = Lru::new(3);
        for key in ["a", "b", "c"] {
            lru.put(key, key.to_uppercase(), 1);
        }
        assert_eq!(lru.get(&"a").as_deref(), Some("A"));
        lru.put("d", "D".to_owned(), 1);
        assert_eq!(["a", "b", "c", "d"].map(|key| lru.contains(&key)), [true, false, true, true]);
        lru.put("e", "E".to_owned(), 4);
        assert!(!lru.contains(&"e") && lru.contains(&"d"), "it has no room at all, so nothing goes for it");
        lru.retain(|value| value == "D");
        assert_eq!(["a", "c", "d"].map(|key| lru.contains(&key)), [false, false, true]);
        assert_eq!((lru.cost, lru.order.len()), (1, 1));
    }

    proptest! {
        #[test]
        fn costs_stay_below_the_limit_and_the_last_one_is_kept(puts in prop::collection::vec((0u8..12, 0u64..9), 1..60)) {
            let mut lru = Lru::new(20);
            for (key, cost) in puts {
                lru.put(key, cost, cost);
                prop_assert_eq!(lru.get(&key), Some(cost));
                prop_assert!(lru.cost <= 20);
                prop_assert_eq!(lru.cost, lru.values.values().map(|held| held.cost).sum::<u64>());
                prop_assert_eq!(lru.order.len(), lru.values.len());
            }
        }
    }
}
