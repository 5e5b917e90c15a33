//! The page of one job as a file of its own, which a browser shows without a server.

use std::collections::BTreeMap;

use serde_json::json;

use crate::assets::{SCRIPTS, STYLES, page};
use crate::curves::{Curves, Seen};
use crate::job::Job;

/// Bytes of all logs in a record.
const LOGS: usize = 512 << 10;

/// Returns the page of `job` as it is at the time `now`, in milliseconds since 1970, with the last lines of each process.
pub fn html(job: &Job, curves: &Curves, tails: &BTreeMap<String, String>, now: u64) -> String {
    let share = LOGS / tails.len().max(1);
    let tails: BTreeMap<&String, &str> = tails.iter().map(|(process, text)| (process, last(text, share))).collect();
    let curves = curves.news(&mut Seen::default());
    let record = json!({"job": job, "curves": curves, "tails": tails, "time": now});
    // Nothing in a string ends the script that it is in.
    let record = record.to_string().replace('<', "\\u003c");
    let styles = STYLES.map(|style| format!("<style>\n{}\n</style>\n", style.text));
    let scripts = SCRIPTS.map(|script| format!("<script>\n{}\n</script>\n", script.text));
    let record = format!("<script type=\"application/json\" id=\"record\">{record}</script>\n");
    page(&styles.concat(), &(record + &scripts.concat()))
}

/// Returns the last lines of `text` that have at most `bytes` together.
fn last(text: &str, bytes: usize) -> &str {
    if text.len() <= bytes {
        return text;
    }
    let tail = &text[text.ceil_char_boundary(text.len() - bytes)..];
    tail.split_once('\n').map_or("", |(_, whole)| whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_ends_no_script_early_and_is_bounded() {
        let job = Job { name: "</script><script>alert(1)</script>".into(), ..Job::default() };
        let log = format!("{}<!--<script>\n", "línea larga\n".repeat(100_000));
        let tails = BTreeMap::from([("ps-0".to_owned(), log.clone()), ("trainer-0".to_owned(), log)]);
        let html = html(&job, &Curves::default(), &tails, 5);
        assert_eq!(html.matches("<script").count(), SCRIPTS.len() + 1, "one for each file, and one for the record");
        assert_eq!(html.matches("</script>").count(), SCRIPTS.len() + 1);
        assert!(html.len() < 1 << 20, "{} bytes", html.len());
    }

    #[test]
    fn tails_are_whole_lines() {
        assert_eq!(last("one\ntwo\nthree\n", 100), "one\ntwo\nthree\n");
        assert_eq!(last("one\ntwo\nthree\n", 8), "three\n");
        assert_eq!(last("ééé\nz\n", 4), "z\n", "the cut is in a letter");
        assert_eq!(last("one", 2), "", "no whole line");
    }
}
