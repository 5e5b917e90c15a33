//! Candidates for kubectl's completion in the shell behind `kubectl psjob`: kubectl calls the program `kubectl_complete-psjob`
//! with the words so far and reads candidates from it, a line each, and a number that says what the shell may add.
//!
//! <https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/>, the protocol is that of Cobra's `__complete`.

use std::time::Duration;

use clap::builder::ValueHint;
use clap::{Arg, Command, CommandFactory as _, FromArgMatches as _};
use kube::api::ListParams;

use crate::command_line::Cli;
use crate::connection::ConnectionArgs;
use crate::text;

/// How long the cluster may take to list jobs.
const LIMIT: Duration = Duration::from_secs(3);
/// Directives of Cobra: the shell adds names of files, or nothing.
const FILES: u32 = 0;
const NO_FILES: u32 = 4;

/// The kind of word that can stand where the cursor is.
#[derive(Debug, PartialEq)]
enum Offer {
    /// One of these, with what each means.
    Words(Vec<(String, String)>),
    /// The name of a job.
    Jobs,
    Files,
    /// Anything.
    Free,
}

/// Prints the candidates for the last of `words`, which stand behind `kubectl psjob`.
pub fn print(words: &[String]) {
    let typed = words.last().map_or("", String::as_str);
    let (lines, directive) = match offer(&Cli::command(), words) {
        Offer::Words(words) => (words, NO_FILES),
        Offer::Jobs => (jobs(words).into_iter().map(|name| (name, String::new())).collect(), NO_FILES),
        Offer::Files => (Vec::new(), FILES),
        Offer::Free => (Vec::new(), NO_FILES),
    };
    for (word, meaning) in lines.iter().filter(|(word, _)| word.starts_with(typed)) {
        text::print(format_args!("{word}{}{meaning}", if meaning.is_empty() { "" } else { "\t" }));
    }
    text::print(format_args!(":{directive}"));
}

/// Returns the kind of word that the last of `words` can be.
fn offer(root: &Command, words: &[String]) -> Offer {
    let Some((typed, before)) = words.split_last() else { return Offer::Free };
    let (mut command, mut positional, mut open) = (root, 0, None);
    for word in before {
        if open.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            open = flag(root, command, word).filter(|flag| flag.get_action().takes_values() && !word.contains('='));
        } else if command.has_subcommands() {
            let Some(found) = command.find_subcommand(word) else { return Offer::Free };
            command = found;
        } else {
            positional += 1;
        }
    }
    if let Some(flag) = open {
        return values(flag);
    }
    if typed.starts_with('-') {
        let flags = command.get_arguments().chain(root.get_arguments().filter(|flag| flag.is_global_set()));
        let flags = flags.filter_map(|flag| Some((format!("--{}", flag.get_long()?), help(flag.get_help()))));
        return Offer::Words(flags.collect());
    }
    if command.has_subcommands() {
        let commands =
            command.get_subcommands().map(|command| (command.get_name().to_owned(), help(command.get_about())));
        return Offer::Words(commands.collect());
    }
    command.get_positionals().nth(positional).map_or(Offer::Free, values)
}

/// The flag of a word such as `-n`, `--namespace` or `--namespace=a`.
fn flag<'a>(root: &'a Command, command: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.split('=').next().unwrap_or(word);
    let mut flags = command.get_arguments().chain(root.get_arguments());
    flags.find(|flag| match name.strip_prefix("--") {
        Some(long) => flag.get_long() == Some(long),
        None => flag.get_short().is_some_and(|short| name == format!("-{short}")),
    })
}

fn values(arg: &Arg) -> Offer {
    let possible = arg.get_possible_values();
    if !possible.is_empty() {
        let values = possible.iter().map(|value| (value.get_name().to_owned(), help(value.get_help())));
        return Offer::Words(values.collect());
    }
    match arg.get_value_hint() {
        // The hint of a PathBuf.
        ValueHint::AnyPath => Offer::Files,
        _ if arg.is_positional() && arg.get_id() == "name" => Offer::Jobs,
        _ => Offer::Free,
    }
}

fn help(text: Option<&clap::builder::StyledStr>) -> String {
    text.map(ToString::to_string).unwrap_or_default()
}

/// Names of the jobs in the namespace that the words name; none if the cluster does not answer in time.
fn jobs(words: &[String]) -> Vec<String> {
    let program = std::iter::once("kubectl-psjob").chain(words.iter().map(String::as_str));
    let Ok(matches) = Cli::command().ignore_errors(true).try_get_matches_from(program) else { return Vec::new() };
    let matches = matches.subcommand().map_or(&matches, |(_, of_command)| of_command);
    let Ok(connection) = ConnectionArgs::from_arg_matches(matches) else { return Vec::new() };
    let listed = async {
        let jobs = connection.open().await.ok()?.jobs().list_metadata(&ListParams::default()).await.ok()?;
        Some(jobs.items.into_iter().filter_map(|job| job.metadata.name).collect())
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let listed =
        runtime.ok().and_then(|runtime| runtime.block_on(async { tokio::time::timeout(LIMIT, listed).await.ok() }));
    listed.flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: &str) -> Offer {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        offer(&Cli::command(), &words)
    }

    #[test]
    fn what_may_follow_is_offered() {
        for (line, wanted) in [
            ("why ", Offer::Jobs),
            ("why mn", Offer::Jobs),
            ("--namespace a why ", Offer::Jobs),
            ("logs -n a ", Offer::Jobs),
            ("why mnist ", Offer::Free),
            ("logs mnist --since ", Offer::Free),
            ("submit ", Offer::Files),
            ("model mnist --output ", Offer::Files),
            ("checkpoint list ", Offer::Jobs),
            ("checkpoint get mnist --output ", Offer::Files),
            ("checkpoint nonsense ", Offer::Free),
            ("clone mnist ", Offer::Free),
            ("nonsense ", Offer::Free),
        ] {
            assert_eq!(at(line), wanted, "{line:?}");
        }
        let words = |line: &str| match at(line) {
            Offer::Words(words) => words.into_iter().map(|(word, _)| word).collect::<Vec<_>>(),
            other => panic!("{line:?}: {other:?}"),
        };
        assert_eq!(words("logs mnist --role "), ["ps", "trainer"]);
        for (line, word) in [
            ("", "why"),
            ("lo", "logs"),
            ("checkpoint ", "get"),
            ("logs --", "--follow"),
            ("logs mnist -", "--namespace"),
        ] {
            assert!(words(line).iter().any(|offered| offered == word), "{line:?} has no {word}");
        }
    }
}
