//! The two kinds of process that a job has.

use std::fmt;

/// The role of a replica in its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A parameter server.
    Server,
    /// A trainer.
    Trainer,
}

impl Role {
    /// `ps` or `trainer`, as in pod names, labels and `PSJOB_ROLE`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Server => "ps",
            Self::Trainer => "trainer",
        }
    }

    /// The reverse of [`Role::as_str`].
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "ps" => Some(Self::Server),
            "trainer" => Some(Self::Trainer),
            _ => None,
        }
    }

    /// Returns the role of the replica `name`, which is `ps-INDEX` or `trainer-INDEX`; `None` for another name.
    #[must_use]
    pub fn of_replica(name: &str) -> Option<Self> {
        let (role, index) = name.rsplit_once('-')?;
        Self::parse(role).filter(|_| index.parse::<u32>().is_ok())
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
