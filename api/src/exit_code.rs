//! The exit codes of a job's processes that the operator and `psjobs run` act on.

/// A program that was given what cannot work: a wrong flag, data that is missing, another model. Another start would
/// end the same way. `psjobs-worker` uses it so, as do argument parsers of most languages and shells.
pub const WRONG_INPUT: i32 = 2;

/// A process that other processes alone ended: a trainer whose server did not answer, a server without trainers, a
/// trainer of a supervised job that was replaced or whose address of a server led to another process. It is started again
/// and not counted, because the other one is the cause. The number is `EX_TEMPFAIL` of `sysexits.h`, by which a program
/// asks to be tried again later.
pub const PEER_AWAY: i32 = 75;
