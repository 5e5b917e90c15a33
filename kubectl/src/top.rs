//! `kubectl psjob top`: a job live in the terminal.

pub(crate) mod board;
mod view;

use std::io::{self, IsTerminal as _};
use std::pin::pin;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use kube::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use psjobs::BadInput;
use psjobs_api::crd::KIND;
use psjobs_api::crd::names::LABEL_JOB;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use self::board::Board;
use crate::connection::{Cluster, ConnectionArgs};
use crate::text;

/// Pause between two pictures while nothing happens: ages and times go on.
const REDRAW: Duration = Duration::from_secs(1);

/// Show a job live: progress, a curve, its pods and events
///
/// Keys: q or Esc ends it and leaves the job alone, m shows the next metric, p holds the picture.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Name of the job
    name: String,
}

impl TopArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        if !io::stdout().is_terminal() {
            let name = &self.name;
            return Err(BadInput::new(format!(
                "top draws on a terminal, and the output is none; `kubectl psjob watch {name}` prints lines"
            ))
            .into());
        }
        let cluster = connection.open().await?;
        let mut board = Board::new(cluster.job(&self.name).await?, Timestamp::now());
        let mut terminal = ratatui::try_init().context("the terminal cannot be drawn on")?;
        let outcome = show(&cluster, &self.name, &mut board, &mut terminal).await;
        ratatui::restore();
        outcome?;
        text::print(board.last_words());
        Ok(0)
    }
}

/// Draws the board until a key ends that.
async fn show(
    cluster: &Cluster,
    name: &str,
    board: &mut Board,
    terminal: &mut ratatui::DefaultTerminal,
) -> anyhow::Result<()> {
    let job = Config::default().fields(&format!("metadata.name={name}"));
    let mut jobs = pin!(watcher(cluster.jobs(), job).default_backoff());
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
    let mut pods = pin!(watcher(pods, Config::default().labels(&format!("{LABEL_JOB}={name}"))).default_backoff());
    let events = Api::<KubernetesEvent>::namespaced(cluster.client.clone(), &cluster.namespace);
    let about = format!("involvedObject.kind={KIND},involvedObject.name={name}");
    let mut events = pin!(watcher(events, Config::default().fields(&about)).default_backoff());
    let (mut keys, mut ticks) = (keys(), tokio::time::interval(REDRAW));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_held = false;
    loop {
        if !is_held {
            let now = Timestamp::now();
            terminal.draw(|frame| view::draw(frame, board, now)).context("the terminal cannot be drawn on")?;
        }
        tokio::select! {
            Some(seen) = jobs.next() => board.see_job(seen, Timestamp::now()),
            Some(seen) = pods.next() => board.see_pod(seen),
            Some(seen) = events.next() => board.see_event(seen),
            Some(key) = keys.recv() => match key {
                Key::End => return Ok(()),
                Key::NextMetric => board.next_metric(),
                Key::Hold => is_held = !is_held,
                Key::Redraw => {}
            },
            _ = ticks.tick() => {}
        }
    }
}

/// A key with a meaning here.
enum Key {
    End,
    NextMetric,
    Hold,
    /// The terminal has another size.
    Redraw,
}

/// Reads keys in a thread of its own, which ends with the program.
fn keys() -> mpsc::UnboundedReceiver<Key> {
    let (sender, keys) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if let Some(key) = meaning(&event)
                && sender.send(key).is_err()
            {
                return;
            }
        }
    });
    keys
}

fn meaning(event: &Event) -> Option<Key> {
    match event {
        Event::Resize(..) => Some(Key::Redraw),
        Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) => match code {
            KeyCode::Char('q') | KeyCode::Esc => Some(Key::End),
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Some(Key::End),
            KeyCode::Char('m') => Some(Key::NextMetric),
            KeyCode::Char('p') => Some(Key::Hold),
            _ => None,
        },
        _ => None,
    }
}
