//! How far training has come on one server, to see whether a checkpoint holds all of it.

use psjobs_api::training::ConsistencyMode;

use crate::proto;
use crate::server::state::ServerState;

/// How far training had come in a state. In Sync, states of one extent are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Steps that it contains.
    pub steps: u64,
    /// The step of the layers that trainers train themselves, where there are sparse tables; else 0.
    pub layers: u64,
}

impl Extent {
    /// Returns the extent of the state at `version`.
    pub fn at(state: &ServerState, version: u64) -> Self {
        Self { steps: version, layers: state.tables_beside_own_layers().map_or(0, |_| version) }
    }
}

impl From<Extent> for proto::Extent {
    fn from(Extent { steps, layers }: Extent) -> Self {
        Self { steps, layers }
    }
}

impl From<proto::Extent> for Extent {
    fn from(proto::Extent { steps, layers }: proto::Extent) -> Self {
        Self { steps, layers }
    }
}

/// Returns how far training has come on this server, `None` while blocks are without values.
pub async fn extent(state: &ServerState) -> Option<Extent> {
    let progress = state.progress().await?;
    let sync = state.config.training.consistency.mode == ConsistencyMode::Sync;
    let steps = if sync { progress.version } else { progress.step };
    let layers = match state.tables_beside_own_layers() {
        Some(_) => state.store().ok()?.progress(state.config.index).await?.version,
        None => 0,
    };
    Some(Extent { steps, layers })
}
