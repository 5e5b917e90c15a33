//! The error for something that the user gave and that cannot work.

use std::fmt;

/// Something that the user gave cannot work; the text says what to write instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadInput(String);

impl BadInput {
    pub(crate) const EXIT_CODE: u8 = 2;

    pub fn new(message: impl fmt::Display) -> Self {
        Self(message.to_string())
    }
}
