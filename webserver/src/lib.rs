//! `psjobs-web`: the page of a cluster's jobs, for everyone whose token gives the right to see them, and the records of jobs that
//! are over, which the page shows after they were deleted. docs/web.md describes it for its users.
//!
//! [`watch`] follows the cluster and has records made, [`recorder`] decides when, [`record`] writes one as text, and [`records`]
//! keeps them. [`server`] serves the page, [`access`] asks the cluster what a visitor may see, and [`login`] takes their token.

pub mod access;
pub mod cache;
pub mod login;
pub mod record;
pub mod recorder;
pub mod records;
mod series;
pub mod server;
mod server_0;
pub mod settings;
mod tails;
mod trainers;
pub mod watch;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use kubectl_psjob::web::follow::Scope;
use psjobs_web::Board;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::records::Records;
use crate::server::{Site, router};
use crate::settings::Settings;
use crate::watch::Watch;

/// Time in which browsers get the last state at the end.
const FAREWELL: Duration = Duration::from_secs(3);

/// Serves the page at `listener` until `stop`.
///
/// # Errors
/// If the configuration cannot be used, or the listener fails.
pub async fn run(
    settings: Settings,
    config: kube::Config,
    listener: TcpListener,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let folder = settings.records.as_deref().map(|place| psjobs_object_store::folder(place, variables)).transpose()?;
    let client = Client::try_from(config).context("the configuration of the cluster cannot be used")?;
    let (board, ready) = (Arc::new(Board::default()), Arc::new(AtomicBool::new(false)));
    let records = Arc::new(Records::new(folder));
    let watch = Watch {
        client: client.clone(),
        scope: Scope { namespace: settings.namespace, name: None },
        board: board.clone(),
        records: records.clone(),
        keep: settings.keep_records,
        ready: ready.clone(),
    };
    let access = Arc::new(Access::new(client.clone()));
    let site = Site { board: board.clone(), records, access, client, ready };
    let stopped = stop.clone();
    let serving = axum::serve(listener, router(site)).with_graceful_shutdown(async move {
        stopped.cancelled().await;
        board.close();
    });
    tokio::select! {
        served = serving.into_future() => served.context("the page cannot be served any more"),
        () = watch.run() => Ok(()),
        () = farewell(&stop) => Ok(()),
    }
}

/// Waits until connections that do not end have had time to.
async fn farewell(stop: &CancellationToken) {
    stop.cancelled().await;
    tokio::time::sleep(FAREWELL).await;
}
