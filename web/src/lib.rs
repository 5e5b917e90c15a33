//! The web page of jobs: `psjobs run --web` shows the job of this machine, `kubectl psjob web` those of a cluster, and
//! `psjobs-web` in a cluster those of everyone who may see them.
//!
//! Whoever knows of the jobs writes them to a [`Board`]; [`serve`] sends what changes to every browser that shows the page.
//! [`record::html`] writes the page of one job to a file, which needs no server. docs/web.md describes the page for its users.
//!
//! [`job`] names what the page shows, [`trainers`] writes what server 0 reports of trainers to it, [`curves`] holds the metrics within bounds, `changes` decides what a browser lacks,
//! and `page/` has what a browser gets.

mod assets;
mod board;
mod changes;
pub mod curves;
mod door;
mod files;
pub mod job;
pub mod record;
mod server;
mod token;
pub mod trainers;

use std::time::{SystemTime, UNIX_EPOCH};

pub use board::{Board, Reader, State, Watching};
pub use door::{Door, DoorError};
pub use files::{files, protect};
pub use server::{Logs, Site, serve};
pub use token::Token;

/// Milliseconds since 1970, now.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
