//! Tests of whole jobs whose servers and trainers are processes of psjobs-worker. They are one program, because each
//! program links libtorch anew. Tests that seed libtorch's global generator are programs of their own beside this.

mod adaptive_batch;
mod checkpoint_files;
mod elastic;
mod mnist;
mod peer_away;
mod process;
mod remote;
mod streamed;
mod workloads;
