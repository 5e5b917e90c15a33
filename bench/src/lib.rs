//! The code of the programs `psjobs-bench` and `psjobs-compare`, which `psjobs bench` and `psjobs compare` call:
//! [`cases`] holds the benchmarks, [`compare`] trains in several ways and draws a page. They run jobs ([`job`]) as
//! `psjobs run` does, or servers as processes of their own ([`processes`], [`server`]), also where their machine is to vanish
//! ([`namespace`]) or their name to lead to a successor ([`names`]); [`store`] is an object store of theirs.

pub mod cases;
pub mod compare;
mod job;
mod names;
mod namespace;
mod processes;
mod report;
mod server;
mod store;
