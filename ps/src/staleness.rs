//! Staleness: how many updates a block got between a trainer's pull of it and that trainer's
//! gradient for it. What the learning rate does about it (Zhang et al., IJCAI 2016: with 30
//! learners a constant rate diverges, one divided by the staleness trains) and how often it occurs.

/// The effect of staleness on the learning rate of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Damping {
    /// Nothing.
    #[default]
    None,
    /// It is divided by 1 + coefficient x staleness.
    Damped {
        /// At least 0.
        coefficient: f64,
    },
    /// It is divided by the staleness where that is above 1.
    Inverse,
}

impl Damping {
    /// Factor on the learning rate, above 0 and at most 1.
    #[must_use]
    pub fn factor(self, staleness: u64) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Damped { coefficient } => 1.0 / (1.0 + coefficient * staleness as f64),
            Self::Inverse => 1.0 / staleness.max(1) as f64,
        }
    }
}

/// How many updates had which staleness, in buckets 0, 1, 2, 3 to 4, 5 to 8 and so on by powers of
/// two up to 1024, then all above: fixed memory, fine where it matters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum: u64,
}

const BUCKETS: usize = 13;

impl Histogram {
    /// Upper end of each bucket but the last, which has none.
    pub const BOUNDS: [u64; BUCKETS - 1] = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

    /// Counts one update.
    pub fn record(&mut self, staleness: u64) {
        self.counts[Self::BOUNDS.partition_point(|bound| *bound < staleness)] += 1;
        self.sum = self.sum.saturating_add(staleness);
    }

    /// Updates in each bucket.
    #[must_use]
    pub fn counts(&self) -> &[u64; BUCKETS] {
        &self.counts
    }

    /// Updates in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damping_divides_by_what_it_says() {
        let damped = Damping::Damped { coefficient: 0.1 };
        for (damping, staleness, want) in [
            (Damping::None, 1000, 1.0),
            (damped, 0, 1.0),
            (damped, 10, 0.5),
            (Damping::Inverse, 0, 1.0),
            (Damping::Inverse, 1, 1.0),
            (Damping::Inverse, 30, 1.0 / 30.0),
        ] {
            assert_eq!(damping.factor(staleness), want, "{damping:?} at {staleness}");
        }
    }

    #[test]
    fn every_staleness_has_its_bucket() {
        for (staleness, bucket) in
            [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (1024, 11), (1025, 12), (u64::MAX, 12)]
        {
            let mut histogram = Histogram::default();
            histogram.record(staleness);
            assert_eq!(histogram.counts()[bucket], 1, "staleness {staleness}");
            assert_eq!(histogram.total(), 1);
        }
    }
}
