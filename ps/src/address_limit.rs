//! Limits what one address may have under way, so that it cannot take the places of all others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts what is under way from each address. The addresses of an IPv6 network of 64 bits count as one, because one machine
/// can have all of them.
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
        let address = address.map(counted);
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

/// Returns the address that is counted for `address`.
fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

impl Entry {
    /// Returns the address that is counted.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
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

    #[test]
    fn addresses_that_one_machine_can_have_count_as_one() {
        let address = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        for (one, other, has_room) in [
            ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", false),
            ("2001:db8:0:1::1", "2001:db8:0:2::1", true),
            ("10.0.0.1", "::ffff:10.0.0.1", false),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.2", true),
        ] {
            let limit = AddressLimit::new(1);
            let held = limit.enter(address(one)).expect("room");
            assert_eq!(limit.enter(address(other)).is_some(), has_room, "{one} and {other}");
            drop(held);
            assert!(limit.under_way.lock().is_empty(), "{one} and {other}");
        }
    }
}
