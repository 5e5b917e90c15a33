//! The tests, one function each, by area: each does what a user does, and checks what the user sees.

pub mod broken;
pub mod colocated;
pub mod elastic;
pub mod failure;
pub mod gpu;
pub mod invalid;
pub mod kubectl_psjob;
pub mod kubelet;
pub mod mnist;
pub mod nodes;
pub mod object_store;
pub mod operators;
mod page;
pub mod pytorch;
pub mod recovery;
mod store;
pub mod suspend;
pub mod timing;
pub mod tls;
pub mod unschedulable;
pub mod watched_in_chromium;
pub mod web;
pub mod workloads;
