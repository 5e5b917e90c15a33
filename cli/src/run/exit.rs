//! How a process ended.

use std::fmt;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// It could not be started.
    NotStarted,
}

impl Exit {
    pub fn is_good(self) -> bool {
        self == Self::Code(0)
    }

    /// Returns it as a container's exit code.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::NotStarted => 127,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(9) => f.write_str("was killed by signal 9 (SIGKILL), perhaps because memory ran out"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was killed by signal {signal} ({name})"),
                None => write!(f, "was killed by signal {signal}"),
            },
            Self::NotStarted => f.write_str("could not be started"),
        }
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    let names = [(1, "SIGHUP"), (2, "SIGINT"), (4, "SIGILL"), (6, "SIGABRT"), (7, "SIGBUS"), (8, "SIGFPE")];
    let more = [(11, "SIGSEGV"), (13, "SIGPIPE"), (15, "SIGTERM"), (24, "SIGXCPU")];
    names.into_iter().chain(more).find(|(number, _)| *number == signal).map(|(_, name)| name)
}
