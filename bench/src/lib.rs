//! The code of the programs `psjobs-bench` and `psjobs-compare`, which `psjobs bench` and `psjobs compare` call:
//! [`cases`] holds the benchmarks, [`compare`] trains in several ways and draws a page. They run jobs ([`job`]) as
//! `psjobs run` does, or servers as processes of their own ([`processes`]).

pub mod cases;
pub mod compare;
mod job;
mod processes;
mod report;
