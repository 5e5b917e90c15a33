//! Counts the TLS handshakes under way from each address, so that one address cannot take the places of all others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Handshakes that one address may have under way. The trainers of a node may share its address, and a handshake takes
/// milliseconds.
const MOST_OF_ADDRESS: usize = 64;

/// The handshakes under way.
#[derive(Clone, Default)]
pub struct Handshakes(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A handshake under way; dropped when it has ended.
pub struct Handshake {
    handshakes: Handshakes,
    address: Option<IpAddr>,
}

impl Handshakes {
    /// Begins a handshake; `None` if the address has too many under way. One of an unknown address always begins.
    pub fn begin(&self, address: Option<IpAddr>) -> Option<Handshake> {
        if let Some(address) = address {
            let mut under_way = self.0.lock();
            let count = under_way.entry(address).or_default();
            if *count >= MOST_OF_ADDRESS {
                return None;
            }
            *count += 1;
        }
        Some(Handshake { handshakes: self.clone(), address })
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut under_way = self.handshakes.0.lock();
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
    fn an_address_with_many_handshakes_keeps_no_other_out() {
        let handshakes = Handshakes::default();
        let (silent, other) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        let mut held: Vec<_> = (0..MOST_OF_ADDRESS).map(|_| handshakes.begin(silent).expect("room")).collect();
        assert!(handshakes.begin(silent).is_none());
        assert!(handshakes.begin(other).is_some() && handshakes.begin(None).is_some());
        held.pop();
        assert!(handshakes.begin(silent).is_some(), "one has ended");
        held.clear();
        assert!(handshakes.0.lock().is_empty(), "nothing is kept of those that have ended");
    }
}
