//! Text as numbers: words and marks, a vocabulary of the most frequent, and windows of tokens with the
//! tokens that follow them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tch::{Device, Tensor};

use psjobs_worker::data::Dataset;

/// Stands for every word that the vocabulary does not have.
pub const UNKNOWN: &str = "<unk>";

/// Why a text or a vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("there is no text at {}; run `scripts/text.sh`, or name a file with --data", .0.display())]
    Missing(PathBuf),
    #[error("cannot read {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{}, line {line}: not UTF-8; convert the file", file.display())]
    Encoding { file: PathBuf, line: usize },
    #[error("{} has {tokens} words, too few to train and test on; give at least {}", file.display(), .least)]
    TooShort { file: PathBuf, tokens: usize, least: usize },
    #[error("{}, line {line}: {problem}; a vocabulary has one word a line, the first is {UNKNOWN}", file.display())]
    Vocabulary { file: PathBuf, line: usize, problem: String },
    #[error("{} has {found} words, the model {want}; give --words {found}, or another --vocabulary", file.display())]
    OtherSize { file: PathBuf, found: usize, want: usize },
    #[error("cannot write the vocabulary to {}", file.display())]
    Write { file: PathBuf, source: io::Error },
}

/// The words of a text file, in lower case, and its marks, each a word of its own.
///
/// # Errors
/// If the file is missing or no UTF-8.
pub fn read(file: &Path) -> Result<String, TextError> {
    let bytes = fs::read(file).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => TextError::Missing(file.to_owned()),
        _ => TextError::Read { file: file.to_owned(), source },
    })?;
    String::from_utf8(bytes).map(|text| text.to_lowercase()).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        TextError::Encoding { file: file.to_owned(), line }
    })
}

/// Runs of letters, digits and apostrophes; every other character that is not blank stands alone.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let part_of_word = |c: char| c.is_alphanumeric() || c == '\'' || c == '\u{2019}';
        let end = match part_of_word(first) {
            true => rest.find(|c| !part_of_word(c)).unwrap_or(rest.len()),
            false => first.len_utf8(),
        };
        let (word, after) = rest.split_at(end);
        rest = after;
        Some(word)
    })
}

/// Numbers for words. [`UNKNOWN`] is 0, the others follow by frequency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    words: Vec<String>,
    numbers: HashMap<String, i64>,
}

impl Vocabulary {
    fn new(words: Vec<String>) -> Self {
        let numbers = words.iter().cloned().zip(0..).collect();
        Self { words, numbers }
    }

    /// The `size` most frequent words of `text`; of equally frequent ones those first in the alphabet,
    /// so that every trainer builds the same.
    #[must_use]
    pub fn build(text: &str, size: usize) -> Self {
        let mut counts: HashMap<&str, u64> = HashMap::new();
        for word in words(text) {
            *counts.entry(word).or_default() += 1;
        }
        let mut ranked: Vec<(&str, u64)> = counts.into_iter().collect();
        ranked.sort_unstable_by(|(a, n), (b, m)| m.cmp(n).then(a.cmp(b)));
        let kept = ranked.into_iter().map(|(word, _)| word).take(size.saturating_sub(1));
        Self::new(std::iter::once(UNKNOWN).chain(kept).map(str::to_owned).collect())
    }

    /// Reads what [`Vocabulary::save`] wrote.
    ///
    /// # Errors
    /// If the file cannot be read or is no vocabulary.
    pub fn open(file: &Path) -> Result<Self, TextError> {
        let text = fs::read_to_string(file).map_err(|source| TextError::Read { file: file.to_owned(), source })?;
        let refuse = |line, problem| Err(TextError::Vocabulary { file: file.to_owned(), line, problem });
        let words: Vec<String> = text.lines().map(str::to_owned).collect();
        if words.first().map(String::as_str) != Some(UNKNOWN) {
            return refuse(1, format!("it is {:?}", words.first().map_or("", String::as_str)));
        }
        let mut seen = HashSet::new();
        for (word, line) in words.iter().zip(1..) {
            if word.is_empty() || word.contains(char::is_whitespace) {
                return refuse(line, format!("{word:?} is no word"));
            }
            if !seen.insert(word) {
                return refuse(line, format!("{word:?} is there twice"));
            }
        }
        Ok(Self::new(words))
    }

    /// Writes one word a line. The file appears whole: other trainers may write the same one.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self, file: &Path) -> Result<(), TextError> {
        let part = file.with_added_extension(format!("{}.part", std::process::id()));
        let written = fs::write(&part, self.words.join("\n") + "\n").and_then(|()| fs::rename(&part, file));
        written.map_err(|source| TextError::Write { file: file.to_owned(), source })
    }

    /// Number of words, with [`UNKNOWN`].
    #[must_use]
    pub fn size(&self) -> usize {
        self.words.len()
    }

    /// The numbers of a text's words.
    #[must_use]
    pub fn tokens(&self, text: &str) -> Vec<i64> {
        words(text).map(|word| self.numbers.get(word).copied().unwrap_or(0)).collect()
    }
}

/// A text cut into windows of equal length; the last token of one is the first of the next.
#[derive(Debug)]
pub struct Windows {
    /// `[n, length + 1]`, i64; the rows overlap by one and share the text's memory.
    windows: Tensor,
}

impl Windows {
    /// Windows of `length` tokens and the one that follows them.
    ///
    /// # Panics
    /// If there are not more tokens than `length`.
    #[must_use]
    pub fn new(tokens: &[i64], length: usize, device: Device) -> Self {
        assert!(tokens.len() > length, "{} tokens for windows of {length}", tokens.len());
        let length = length as i64;
        Self { windows: Tensor::from_slice(tokens).to(device).unfold(0, length + 1, length) }
    }
}

impl Clone for Windows {
    /// Shares the memory.
    fn clone(&self) -> Self {
        Self { windows: self.windows.shallow_clone() }
    }
}

impl Dataset for Windows {
    /// Tokens and, for each, the one that follows it; both `[b, length]`.
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        self.windows.size()[0] as usize
    }

    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        let examples = Tensor::from_slice(examples).to(self.windows.device());
        let windows = self.windows.index_select(0, &examples);
        let length = windows.size()[1] - 1;
        (windows.narrow(1, 0, length), windows.narrow(1, 1, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_falls_into_words_and_marks() {
        let found: Vec<&str> = words("in the  beginning, god's \u{201c}light\u{201d}\n42.").collect();
        assert_eq!(found, ["in", "the", "beginning", ",", "god's", "\u{201c}", "light", "\u{201d}", "42", "."]);
        assert_eq!(words(" \n").count(), 0);
    }

    #[test]
    fn the_most_frequent_words_have_numbers_and_the_others_are_unknown() {
        let vocabulary = Vocabulary::build("b a c a b a d", 4);
        assert_eq!(vocabulary.words, [UNKNOWN, "a", "b", "c"]);
        assert_eq!(vocabulary.tokens("c d a e"), [3, 0, 1, 0]);
        assert_eq!(Vocabulary::build("a b", 100).size(), 3, "no more words than there are");
    }

    #[test]
    fn a_vocabulary_survives_being_saved_and_damage_is_named_by_line() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("words.txt");
        let vocabulary = Vocabulary::build("let there be light , and there was light", 6);
        vocabulary.save(&file).expect("written");
        assert_eq!(Vocabulary::open(&file).expect("well formed"), vocabulary);
        for (contents, want) in [
            ("", "line 1: it is \"\""),
            ("the\nand\n", "line 1: it is \"the\""),
            ("<unk>\nthe\nthe\n", "line 3: \"the\" is there twice"),
            ("<unk>\nthe and\n", "line 2: \"the and\" is no word"),
        ] {
            fs::write(&file, contents).expect("written");
            let error = Vocabulary::open(&file).expect_err(want).to_string();
            assert!(error.contains(want) && error.contains("words.txt"), "{error}");
        }
        fs::write(&file, b"one\ntwo\xff\n").expect("written");
        assert!(read(&file).expect_err("no UTF-8").to_string().contains("words.txt, line 2"));
        assert!(read(Path::new("/no/text")).expect_err("missing").to_string().contains("scripts/text.sh"));
    }

    #[test]
    fn every_token_but_the_first_is_predicted_once() {
        let tokens: Vec<i64> = (0..11).collect();
        let windows = Windows::new(&tokens, 3, Device::Cpu);
        assert_eq!(windows.examples(), 3, "a rest that fills no window is left out");
        let (inputs, targets) = windows.batch(&[2, 0]);
        let numbers = |tensor: Tensor| Vec::<i64>::try_from(tensor.flatten(0, -1)).expect("i64");
        assert_eq!(numbers(inputs), [6, 7, 8, 0, 1, 2]);
        assert_eq!(numbers(targets), [7, 8, 9, 1, 2, 3]);
    }
}
