//! Draws the board of `top`.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use psjobs_api::crd::Phase;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, LineGauge, Paragraph, Row, Table, Wrap};

use super::board::Board;
use crate::text;
use crate::why::explain;

/// Lines for the state and the progress.
const HEADER: u16 = 4;
/// Lines that the curve and events take at least.
const MIDDLE: u16 = 8;

/// Draws all that is known at the time `now`.
pub fn draw(frame: &mut Frame, board: &Board, now: Timestamp) {
    let pods = board.pods(now);
    let wanted = u16::try_from(pods.len()).unwrap_or(u16::MAX).saturating_add(2);
    let most = frame.area().height.saturating_sub(HEADER + MIDDLE + 1).max(3);
    let [header, middle, below, footer] = Layout::vertical([
        Constraint::Length(HEADER),
        Constraint::Min(MIDDLE),
        Constraint::Length(wanted.min(most)),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_state(frame, header, board, now);
    let [curve, events] = Layout::horizontal([Constraint::Percentage(55), Constraint::Percentage(45)]).areas(middle);
    draw_curve(frame, curve, board);
    draw_events(frame, events, board, now);
    let rows = pods.iter().map(|pod| {
        let note = if pod.is_slow { "slower than the others" } else { "" };
        let row = Row::new([&pod.process, &pod.state, &pod.node, &pod.age, note]);
        if pod.is_well { row } else { row.style(Style::new().fg(Color::Yellow)) }
    });
    let widths = [
        Constraint::Length(12),
        Constraint::Min(18),
        Constraint::Max(24),
        Constraint::Length(6),
        Constraint::Length(22),
    ];
    let table = Table::new(rows, widths).header(Row::new(["PROCESS", "STATE", "NODE", "AGE", ""]).bold());
    frame.render_widget(table, below);
    let hidden = pods.len().saturating_sub(usize::from(below.height.saturating_sub(1)));
    let hidden = if hidden > 0 { format!("{hidden} more processes · ") } else { String::new() };
    frame.render_widget(Line::from(format!("{hidden}q end · m next metric · p hold")).dim(), footer);
}

fn draw_state(frame: &mut Frame, area: Rect, board: &Board, now: Timestamp) {
    let [title, sentence, gauge, rates] = Layout::vertical([Constraint::Length(1); 4]).areas(area);
    let job = &board.job;
    let status = job.status.as_ref();
    let phase = text::phase(job);
    let state = phase.map_or_else(|| "not looked after".to_owned(), |phase| format!("{phase:?}"));
    let color = match phase {
        _ if board.is_deleted => Color::Red,
        Some(Phase::Running | Phase::Succeeded | Phase::Completing) => Color::Green,
        Some(Phase::Failed | Phase::Stalled) => Color::Red,
        _ => Color::Yellow,
    };
    let name = job.metadata.name.clone().unwrap_or_default();
    let roles = status.map(|status| [("servers", &status.ps), ("trainers", &status.trainer)]);
    let roles = roles.into_iter().flatten().filter_map(|(role, of)| Some(format!("{role} {}", of.as_ref()?.summary)));
    let restarts = status.map(|status| format!("replaced {}", status.restarts));
    let age = format!("age {}", text::age(job.metadata.creation_timestamp.as_ref(), now));
    let rest: Vec<String> = roles.chain(restarts).chain([age]).collect();
    let state = Span::from(if board.is_deleted { "deleted".to_owned() } else { state }).fg(color).bold();
    let line = Line::from(vec![name.bold(), "  ".into(), state, format!("  {}", rest.join(" · ")).into()]);
    frame.render_widget(line, title);

    let said = match &board.trouble {
        Some(trouble) => Line::from(format!("the cluster does not answer: {trouble}")).fg(Color::Red),
        None => {
            // The first sentence about a job that trains says how far it is, as the gauge does.
            let trains = phase == Some(Phase::Running) && board.progress().is_some_and(|progress| progress.step > 0);
            Line::from(explain(job, now).sentences.into_iter().nth(usize::from(trains)).unwrap_or_default())
        }
    };
    frame.render_widget(said, sentence);

    let Some(progress) = board.progress().filter(|progress| progress.step > 0) else { return };
    let part = if progress.total_steps > 0 { progress.step as f64 / progress.total_steps as f64 } else { 0.0 };
    let label = text::steps(progress);
    let line = LineGauge::default()
        .ratio(part.clamp(0.0, 1.0))
        .label(label)
        .filled_symbol("━")
        .filled_style(Style::new().fg(color));
    frame.render_widget(line, gauge);
    let rate = progress.examples_per_second.map(|rate| format!("{} examples/s", text::number(rate)));
    let left = progress.estimated_remaining_seconds.map(|left| format!("about {} left", text::span(left)));
    let metrics = progress.metrics.iter().map(|metric| format!("{} {}", metric.name, text::number(metric.value)));
    let all: Vec<String> = metrics.chain(rate).chain(left).collect();
    frame.render_widget(Line::from(all.join(" · ")), rates);
}

fn draw_curve(frame: &mut Frame, area: Rect, board: &Board) {
    let since = board.since.to_zoned(TimeZone::system()).strftime("%H:%M").to_string();
    let (Some(name), [first, .., last]) = (board.metric(), board.curve()) else {
        let text = "two values of a metric make a curve; none have come yet";
        let text = Paragraph::new(text).wrap(Wrap { trim: true }).dim();
        return frame.render_widget(text.block(Block::bordered().title("metrics")), area);
    };
    let values = board.curve().iter().map(|(_, value)| *value);
    let (low, high) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(f64::NEG_INFINITY, f64::max));
    // A curve that is flat still needs a height.
    let room = if high > low { 0.0 } else { high.abs().max(1.0) / 10.0 };
    let (low, high) = (low - room, high + room);
    let curve = Dataset::default().data(board.curve()).graph_type(GraphType::Line).marker(Marker::Braille);
    let label = |value: f64| text::number(value);
    let step = |value: f64| format!("{value:.0}");
    let chart = Chart::new(vec![curve.style(Style::new().fg(Color::Cyan))])
        .block(Block::bordered().title(format!("{name} {} since {since}", label(last.1))))
        .x_axis(Axis::default().bounds([first.0, last.0]).labels([step(first.0), step(last.0)]))
        .y_axis(Axis::default().bounds([low, high]).labels([label(low), label(high)]));
    frame.render_widget(chart, area);
}

fn draw_events(frame: &mut Frame, area: Rect, board: &Board, now: Timestamp) {
    let lines: Vec<Line> = board
        .events(now)
        .into_iter()
        .map(|event| {
            let color = if event.is_warning { Color::Yellow } else { Color::Reset };
            let age = format!("{:>4} ", event.age).dim();
            Line::from(vec![age, event.reason.fg(color).bold(), format!(" {}", event.message).into()])
        })
        .collect();
    let events = Paragraph::new(lines).wrap(Wrap { trim: true }).block(Block::bordered().title("events"));
    frame.render_widget(events, area);
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher::Event;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::{Value, json};

    use super::super::board::tests::{at, event, job, pod, progress};
    use super::*;

    /// The lines of a terminal of this size.
    fn drawn(board: &Board, (width, height): (u16, u16)) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
        terminal.draw(|frame| draw(frame, board, at(0))).expect("drawn");
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    fn board() -> Board {
        let mut board = Board::new(job("a", "Running", progress(10, 2.0)), at(-20));
        board.see_job(Ok(Event::Apply(job("a", "Running", progress(780, 0.5)))), at(0));
        board.see_pod(Ok(Event::Apply(pod("ps", 0, true, json!({"running": {}})))));
        board.see_pod(Ok(Event::Apply(pod("trainer", 1, true, json!({"running": {}})))));
        board.see_event(Ok(Event::Apply(event("x", -5, true))));
        board
    }

    #[test]
    fn everything_about_a_job_is_on_one_page() {
        let lines = drawn(&board(), (110, 24));
        let page = lines.join("\n");
        for part in [
            "mnist  Running  replaced 1 · age 70s",
            "Clearly slower than the other trainers: mnist-trainer-1.",
            "step 780 of 1500 (52%)",
            "accuracy 0.9 · loss 0.5 · 641.5 examples/s · about 100s left",
            "loss 0.5 since ",
            "5s PodLost trainer 1 was lost",
            "PROCESS      STATE",
            "trainer-1    Running",
            "slower than the others",
            "q end · m next metric · p hold",
        ] {
            assert!(page.contains(part), "{part:?} is not on the page:\n{page}");
        }
        assert!(page.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "no curve:\n{page}");
    }

    #[test]
    fn a_small_terminal_and_a_job_without_anything_are_drawn_too() {
        for size in [(1, 1), (20, 5), (40, 10), (300, 100)] {
            drawn(&board(), size);
            drawn(&Board::new(job("a", "Pending", Value::Null), at(0)), size);
        }
        let mut board = board();
        for index in 0..100 {
            board.see_pod(Ok(Event::Apply(pod("trainer", index, true, json!({"running": {}})))));
        }
        let page = drawn(&board, (110, 24)).join("\n");
        assert!(page.contains("more processes · q end"), "{page}");
    }
}
