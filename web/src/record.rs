//! The page of one job as a file of its own, which a browser shows without a server.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::assets::{SCRIPTS, STYLES, page};
use crate::curves::{Curves, Seen};
use crate::job::Job;

/// Bytes of all logs in a record, as they are written there.
const LOGS: usize = 384 << 10;
/// Points of all curves in a record, of about 35 bytes.
const POINTS: usize = 10_000;

/// Returns the page of `job` as it is at the time `now`, in milliseconds since 1970, with the last lines of each process.
pub fn html(job: &Job, curves: &Curves, tails: &BTreeMap<String, String>, now: u64) -> String {
    let share = LOGS / tails.len().max(1);
    let tails: BTreeMap<&String, &str> = tails.iter().map(|(process, text)| (process, fitting(text, share))).collect();
    let curves = curves.thinned(POINTS).news(&mut Seen::default());
    let record = written(&json!({"job": job, "curves": curves, "tails": tails, "time": now}));
    let styles = STYLES.map(|style| format!("<style>\n{}\n</style>\n", style.text));
    let scripts = SCRIPTS.map(|script| format!("<script>\n{}\n</script>\n", script.text));
    let record = format!("<script type=\"application/json\" id=\"record\">{record}</script>\n");
    page(&styles.concat(), &(record + &scripts.concat()))
}

/// Returns a value as JSON in which nothing ends the script that it is in.
fn written(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// Returns the last lines of `text` that take at most `bytes` where they are written.
pub fn fitting(text: &str, bytes: usize) -> &str {
    let mut text = last(text, bytes);
    while !text.is_empty() && written(&json!(text)).len() > bytes {
        text = last(text, text.len() / 2);
    }
    text
}

/// Returns the last lines of `text` that have at most `bytes` together, or the end of a line that has more. A carriage return ends
/// a line, too: progress bars write nothing else.
pub fn last(text: &str, bytes: usize) -> &str {
    if text.len() <= bytes {
        return text;
    }
    let tail = &text[text.ceil_char_boundary(text.len() - bytes)..];
    let whole = tail.split_once(['\n', '\r']).map_or("", |(_, whole)| whole);
    if whole.is_empty() { tail } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_ends_no_script_early_and_is_bounded() {
        let job = Job { name: "</script><script>alert(1)</script>".into(), ..Job::default() };
        let log = format!("{}<!--<script>\n", "línea larga\n".repeat(100_000));
        let bars = "\u{1b}[1m<b>\r".repeat(100_000);
        let tails = BTreeMap::from([("ps-0".to_owned(), log), ("trainer-0".to_owned(), bars)]);
        let mut curves = Curves::default();
        for step in 0..40 * 2_000 {
            let name = format!("metric-{}", step % 40);
            curves.push(&name, None, step, 1_800_000_000_000 + step, (step as f64).sqrt());
        }
        let html = html(&job, &curves, &tails, 5);
        assert_eq!(html.matches("<script").count(), SCRIPTS.len() + 1, "one for each file, and one for the record");
        assert_eq!(html.matches("</script>").count(), SCRIPTS.len() + 1);
        assert!(html.len() < 1 << 20, "{} bytes", html.len());
    }

    #[test]
    fn tails_are_whole_lines() {
        assert_eq!(last("one\ntwo\nthree\n", 100), "one\ntwo\nthree\n");
        assert_eq!(last("one\ntwo\nthree\n", 8), "three\n");
        assert_eq!(last("ééé\nz\n", 4), "z\n", "the cut is in a letter");
        assert_eq!(last("one\rtwo\rthree", 9), "three");
        assert_eq!(last("a long line\n", 5), "line\n", "no whole line");
    }
}
