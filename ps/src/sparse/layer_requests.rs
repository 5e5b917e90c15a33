//! The requests of checkpoints for layers that the trainers train themselves.

use parking_lot::Mutex;

/// The steps after which layers are requested. Several requests may be open at once: server 0, which gives a part of a
/// checkpoint up, may ask for the next one before this server knows of that.
#[derive(Debug, Default)]
pub struct LayerRequests(Mutex<Vec<u64>>);

/// An open request; it ends when this is dropped.
pub struct LayerRequest<'a> {
    requests: &'a LayerRequests,
    step: u64,
}

impl LayerRequests {
    /// Requests the layers of `step`.
    pub fn open(&self, step: u64) -> LayerRequest<'_> {
        self.0.lock().push(step);
        LayerRequest { requests: self, step }
    }

    /// Returns the first step whose layers are requested, 0 if none are.
    pub fn first(&self) -> u64 {
        self.0.lock().iter().copied().min().unwrap_or(0)
    }
}

impl Drop for LayerRequest<'_> {
    fn drop(&mut self) {
        let mut open = self.requests.0.lock();
        if let Some(place) = open.iter().position(|step| *step == self.step) {
            open.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_given_up_leaves_the_next_one_open() {
        let requests = LayerRequests::default();
        assert_eq!(requests.first(), 0);
        let given_up = requests.open(4);
        let next = requests.open(6);
        assert_eq!(requests.first(), 4);
        drop(given_up);
        assert_eq!(requests.first(), 6);
        let again = requests.open(6);
        drop(next);
        assert_eq!(requests.first(), 6);
        drop(again);
        assert_eq!(requests.first(), 0);
    }
}
