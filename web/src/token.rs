//! The secret without which the page shows nothing: other users of this machine reach its address, too.

use std::fmt;

/// 128 random bits as 32 hexadecimal digits.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    pub fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// Says if `given` is this token. The time that this takes says nothing about where they differ.
    pub fn matches(&self, given: &str) -> bool {
        let differences = self.0.bytes().zip(given.bytes()).fold(0, |all, (ours, theirs)| all | (ours ^ theirs));
        given.len() == self.0.len() && differences == 0
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_matches() {
        let token = Token::random();
        assert!(token.matches(token.as_str()));
        let other = Token::random();
        for wrong in ["", &token.as_str()[1..], &format!("{}0", token.as_str()), other.as_str()] {
            assert!(!token.matches(wrong), "{wrong}");
        }
        assert_eq!(format!("{token:?}"), "Token", "it is not in logs");
    }
}
