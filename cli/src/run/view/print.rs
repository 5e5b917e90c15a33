//! Writes to standard error.

use std::io::Write as _;

/// Writes a line. An error is ignored, because it means that there is no reader.
pub fn print(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}
