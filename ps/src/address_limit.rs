//! Limits what one address may have under way, so that it cannot take the places of all others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts what is under way from each address.
#[derive(Clone)]
pub struct AddressLimit {
    /// Greatest number for one address.
    most: usize,
    under_way: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One place of an address; dropped when it is free again.
pub struct Entry {
    limit: AddressLimit,
    address: Option<IpAddr>,
}

impl AddressLimit {
    /// Allows `most` at once to each address.
    pub fn new(most: usize) -> Self {
        Self { most, under_way: Arc::default() }
    }

    /// Takes a place; `None` if the address has none left. An unknown address always has one.
    pub fn enter(&self, address: Option<IpAddr>) -> Option<Entry> {
        if let Some(address) = address {
            let mut under_way = self.under_way.lock();
            let count = under_way.entry(address).or_default();
            if *count >= self.most {
                return None;
            }
            *count += 1;
        }
        Some(Entry { limit: self.clone(), address })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut under_way = self.limit.under_way.lock();
        if let Some(count) = under_way.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                under_way.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_many_places_keeps_no_other_out() {
        let limit = AddressLimit::new(64);
        let (silent, other) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        let mut held: Vec<_> = (0..64).map(|_| limit.enter(silent).expect("room")).collect();
        assert!(limit.enter(silent).is_none());
        assert!(limit.enter(other).is_some() && limit.enter(None).is_some());
        held.pop();
        assert!(limit.enter(silent).is_some(), "one has ended");
        held.clear();
        assert!(limit.under_way.lock().is_empty(), "nothing is kept of those that have ended");
    }
}
