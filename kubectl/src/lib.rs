//! `kubectl psjob`: asks a cluster about its ParameterServerJobs and changes them. What is said about a job follows from
//! the object alone, in functions without I/O.

mod change;
mod checkpoint;
pub mod command_line;
pub mod completion;
mod connection;
mod list;
mod logs;
mod model;
mod programs;
mod reader;
mod source;
mod submit;
mod text;
mod top;
mod watch;
pub mod web;
mod why;
