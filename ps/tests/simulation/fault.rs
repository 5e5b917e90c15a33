//! The faults that may strike a job while it trains.

use std::time::Duration;

use super::disk::DiskFault;

/// A fault that lasts as long is never mended.
pub const FOR_GOOD: Duration = Duration::from_secs(86_400);
/// In so much time a server does some file operations.
const SOME_OPERATIONS: Duration = Duration::from_secs(300);

/// A fault.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connections between a trainer and a server break; with `half` only one side hears of it.
    Break { trainer: u32, server: u32, half: bool },
    /// One of the connections between a trainer and a server breaks.
    Sever { trainer: u32, server: u32, nth: u32 },
    /// Nothing passes between a trainer and a server, or in one direction only.
    Partition { trainer: u32, server: u32, up: bool, down: bool, lasts: Duration },
    /// Nothing passes between two servers, or in one direction only.
    Split { one: u32, other: u32, there: bool, back: bool, lasts: Duration },
    /// A firewall comes between server 0 and another one: connections break, and new ones are refused.
    Refuse { server: u32, lasts: Duration },
    /// A server dies and is started again; `silent` says that no process hears of its death.
    Kill { server: u32, away: Duration, silent: bool },
    /// A server is asked to stop, and is started again.
    Stop { server: u32, away: Duration },
    /// A trainer dies and is replaced.
    Replace { trainer: u32, away: Duration, silent: bool },
    /// A trainer is replaced because no process reaches it; it lives on, and is back after a while.
    Zombie { trainer: u32, away: Duration, lasts: Duration },
    /// A server is replaced because its node is out of reach for those who replace it. It lives on, and is cut off from
    /// all others for a while, or not at all.
    ZombieServer { server: u32, away: Duration, lasts: Option<Duration> },
    /// A server dies and never comes back.
    Lose { server: u32 },
    /// Something happens to the machine that runs the server and the trainer of this number.
    Machine { number: u32, what: MachineFault, lasts: Duration },
    /// A trainer of an elastic job is asked to leave, and may come back.
    Leave { trainer: u32, back: Option<Duration> },
    /// A trainer of an elastic job dies and is not replaced.
    Lost { trainer: u32, silent: bool },
    /// A trainer of an elastic job does not come with the others.
    Late { trainer: u32, away: Duration },
    /// The disk of a server, or of all, does not do what it should.
    Disk { server: Option<u32>, fault: DiskFault, lasts: Duration },
    /// The machine of a server dies in the file operation after the next `after`; what was not flushed is lost.
    Crash { server: u32, after: u32, away: Duration },
    /// The wall clock jumps.
    Jump { hours: i32 },
}

/// A fault of a machine, which strikes the server and the trainer on it.
#[derive(Clone, Copy, Debug)]
pub enum MachineFault {
    /// Nothing passes between it and others; its processes still hear each other.
    CutOff,
    /// Its processes stand still: they hear no other process, and none hears them. Everything comes at once when they go on.
    Paused,
    /// It vanishes with its processes, which are started again elsewhere.
    Lost,
    /// Its processes live on, and hear everybody, but are replaced elsewhere.
    Replaced,
}

impl Fault {
    /// Returns whether a server loses what it holds, or is held to have lost it.
    pub fn strikes_a_server(&self) -> bool {
        matches!(
            self,
            Self::Kill { .. }
                | Self::Stop { .. }
                | Self::ZombieServer { .. }
                | Self::Split { .. }
                | Self::Refuse { .. }
                | Self::Crash { .. }
                | Self::Machine { .. }
        )
    }

    /// Returns whether a trainer's process is replaced by it alone. In a colocated job its server is replaced with it.
    pub fn replaces_a_trainer(&self) -> bool {
        matches!(self, Self::Replace { .. } | Self::Zombie { .. })
    }

    /// Returns whether it is one of the connection between a server and the trainer of its number, which never leaves their
    /// pod in a colocated job.
    pub fn is_within_a_pod(&self) -> bool {
        match self {
            Self::Break { trainer, server, .. }
            | Self::Sever { trainer, server, .. }
            | Self::Partition { trainer, server, .. } => trainer == server,
            _ => false,
        }
    }

    /// How long it lasts, as far as it is over by itself.
    pub fn lasts(&self) -> Duration {
        match self {
            Self::Partition { lasts, .. } | Self::Split { lasts, .. } | Self::Refuse { lasts, .. } => *lasts,
            Self::Kill { away, .. } | Self::Stop { away, .. } | Self::Replace { away, .. } => *away,
            Self::Zombie { away, lasts, .. } => *away.max(lasts),
            Self::ZombieServer { away, lasts, .. } => *away.max(lasts.as_ref().unwrap_or(away)),
            Self::Leave { back, .. } => back.unwrap_or_default(),
            Self::Late { away, .. } => *away,
            Self::Machine { lasts, .. } => *lasts,
            // The operation may come late.
            Self::Crash { away, .. } => *away + SOME_OPERATIONS,
            Self::Disk { lasts, .. } if *lasts < FOR_GOOD => *lasts,
            Self::Disk { .. } | Self::Jump { .. } | Self::Break { .. } => Duration::ZERO,
            Self::Sever { .. } | Self::Lose { .. } | Self::Lost { .. } => Duration::ZERO,
        }
    }

    /// Its name in summaries.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Break { half: false, .. } => "connections broken",
            Self::Break { half: true, .. } => "connections broken for one side",
            Self::Sever { .. } => "one connection broken",
            Self::Partition { up: true, down: true, .. } => "trainer and server cut off",
            Self::Partition { .. } => "cut off in one direction",
            Self::Split { there: true, back: true, .. } => "servers cut off",
            Self::Split { .. } => "servers cut off in one direction",
            Self::Refuse { .. } => "servers refused by a firewall",
            Self::Kill { silent: false, .. } => "server killed",
            Self::Kill { silent: true, .. } => "server vanished",
            Self::Stop { .. } => "server stopped",
            Self::Replace { silent: false, .. } => "trainer killed",
            Self::Replace { silent: true, .. } => "trainer vanished",
            Self::Zombie { .. } => "trainer replaced, lives on",
            Self::ZombieServer { lasts: None, .. } => "server replaced, lives on",
            Self::ZombieServer { lasts: Some(_), .. } => "server replaced, cut off, lives on",
            Self::Lose { .. } => "server lost for good",
            Self::Machine { what: MachineFault::CutOff, .. } => "machine with server and trainer cut off",
            Self::Machine { what: MachineFault::Paused, .. } => "machine with server and trainer paused",
            Self::Machine { what: MachineFault::Lost, .. } => "machine with server and trainer lost",
            Self::Machine { what: MachineFault::Replaced, .. } => "machine with server and trainer replaced, lives on",
            Self::Leave { .. } => "trainer left",
            Self::Lost { .. } => "trainer lost for good",
            Self::Late { .. } => "trainer late",
            Self::Disk { fault, .. } => fault.name(),
            Self::Crash { .. } => "machine about to die",
            Self::Jump { .. } => "wall clock jumps",
        }
    }
}
