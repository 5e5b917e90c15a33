//! One place in a job.

use std::fmt;

use crate::role::Role;

/// One server or trainer of a job, by role and index. Servers sort before trainers, as ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Replica {
    /// Its role in the job.
    pub role: Role,
    /// Its number within the role, from 0.
    pub index: u32,
}

impl Replica {
    /// Returns the server of this index.
    #[must_use]
    pub const fn server(index: u32) -> Self {
        Self { role: Role::Server, index }
    }

    /// Returns the trainer of this index.
    #[must_use]
    pub const fn trainer(index: u32) -> Self {
        Self { role: Role::Trainer, index }
    }

    /// Returns its rank in a job with so many servers.
    #[must_use]
    pub const fn rank(self, servers: u32) -> u32 {
        match self.role {
            Role::Server => self.index,
            Role::Trainer => servers + self.index,
        }
    }
}

/// Writes `server 0` or `trainer 3`.
impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = if self.role == Role::Server { "server" } else { "trainer" };
        write!(f, "{role} {}", self.index)
    }
}
