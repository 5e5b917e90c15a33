//! The place of a server's tables in the job.

/// The server that holds tables, and the job that they belong to.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// This server among the job's.
    pub server: u32,
    /// Servers of the job.
    pub servers: u32,
    /// Trainers of the job.
    pub trainers: u32,
    /// The job's seed.
    pub seed: u64,
    /// Tasks that share this server's rows.
    pub shards: usize,
}
