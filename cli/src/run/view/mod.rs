//! Shows a running job on standard error: bars on a terminal, plain lines elsewhere,
//! warnings alone with `--quiet`.

mod bars;
mod lines;
mod print;
pub mod words;

use std::io::IsTerminal as _;
use std::sync::Arc;

use psjobs_ps::proto::StatusReply;

use super::exit::Exit;
use super::log::Watcher;
use super::page::Page;
use super::plan::{Plan, Replica};
use bars::Bars;
use lines::Lines;
use print::print;

/// The output that the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    pub progress: Progress,
    /// Every line that the processes write.
    pub output: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Bars if standard error is a terminal, else lines.
    Fitting,
    Lines,
    None,
}

/// Shows one run.
#[derive(Debug)]
pub struct View {
    style: Style,
    output: bool,
    /// Warnings of the servers that were shown.
    shown: Vec<String>,
    /// The web page, if the run has one.
    page: Option<Page>,
}

#[derive(Debug)]
enum Style {
    Bars(Bars),
    Lines(Lines),
    Quiet,
}

impl View {
    pub fn new(wish: Wish, plan: &Plan) -> Self {
        let style = match wish.progress {
            Progress::None => Style::Quiet,
            Progress::Fitting if std::io::stderr().is_terminal() => Style::Bars(Bars::new(plan)),
            Progress::Fitting | Progress::Lines => Style::Lines(Lines::new(&plan.name)),
        };
        Self { style, output: wish.output, shown: Vec::new(), page: None }
    }

    /// Shows on this page, too, what happens from now on.
    pub fn add_page(&mut self, page: Page) {
        self.page = Some(page);
    }

    pub fn page(&self) -> Option<&Page> {
        self.page.as_ref()
    }

    /// Shows something that is good to know.
    pub fn say(&self, text: &str) {
        if !matches!(self.style, Style::Quiet) {
            self.print(text);
        }
    }

    /// Shows something that the user asked for.
    pub fn say_always(&self, text: &str) {
        self.print(text);
    }

    /// Shows something that went wrong or needs attention.
    pub fn warn(&self, text: &str) {
        if let Some(page) = &self.page {
            page.event(text, true);
        }
        self.print(&format!("warning: {text}"));
    }

    fn print(&self, text: &str) {
        match &self.style {
            Style::Bars(bars) => bars.print(text),
            Style::Lines(_) | Style::Quiet => print(text),
        }
    }

    /// Takes the lines of a process, if the user wants to see them.
    pub fn watcher(&self, replica: Replica) -> Option<Watcher> {
        let printer = match &self.style {
            Style::Bars(bars) => bars.printer(),
            Style::Lines(_) | Style::Quiet => Arc::new(print),
        };
        let show: Watcher = Arc::new(move |line: &str| printer(&format!("{replica} | {line}")));
        self.output.then_some(show)
    }

    pub fn started(&mut self, replica: Replica, incarnation: u32) {
        if let Style::Bars(bars) = &mut self.style {
            bars.started(replica, incarnation);
        }
        if let Some(page) = &self.page {
            page.started(replica);
        }
    }

    pub fn ended(&mut self, replica: Replica, exit: Exit) {
        if let Style::Bars(bars) = &mut self.style {
            bars.ended(replica, exit);
        }
        if let Some(page) = &self.page {
            page.ended(replica, exit);
        }
    }

    /// News from server 0.
    pub fn progress(&mut self, status: &StatusReply) {
        match &mut self.style {
            Style::Bars(bars) => bars.progress(status),
            Style::Lines(lines) => lines.progress(status),
            Style::Quiet => {}
        }
        if let Some(page) = &mut self.page {
            page.progress(status);
        }
        for warning in &status.warnings {
            if !self.shown.contains(warning) {
                self.warn(warning);
            }
        }
        self.shown.clone_from(&status.warnings);
    }

    /// The trainers are done.
    pub fn draining(&mut self) {
        match &mut self.style {
            Style::Bars(bars) => bars.draining(),
            Style::Lines(lines) => lines.draining(),
            Style::Quiet => {}
        }
        if let Some(page) = &self.page {
            page.draining();
        }
    }
}
