//! `train lm`.

use std::path::PathBuf;

use clap::Args;
use psjobs_api::ReplicaResult;
use tracing::info;

use crate::data::text::{self, TextError, Vocabulary};
use crate::model::language::Sizes;
use crate::workload::lm::{Cut, Lm};
use psjobs_process::Failure;
use psjobs_worker::cli::train::{Source, TrainArgs};
use psjobs_worker::data::locate;

/// The file in a folder of text.
const TEXT: &str = "text.txt";

/// The model and its text.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Words that the model knows; the others are one
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    words: u32,
    /// File of the words, one a line: read if it is there, else built from the text and written
    #[arg(long, value_name = "FILE")]
    vocabulary: Option<PathBuf>,
    /// Tokens in a window, over which gradients flow
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    window: u32,
    /// Tokens at the end of the text to test on, not trained on
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    held_out: u32,
    /// Length of a word's vector
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    embedding: u32,
    /// Units of the LSTM
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    hidden: u32,
}

#[derive(Clone, Debug, Args)]
pub struct LmArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    train: TrainArgs,
}

impl LmArgs {
    pub fn run(&self) -> Result<ReplicaResult, Failure> {
        self.train.run(|source| self.model.open(source))
    }
}

impl ModelArgs {
    pub fn open(&self, source: &Source) -> anyhow::Result<Lm> {
        let place = locate(source.data.as_deref(), "text")?;
        let file = if place.is_file() { place } else { place.join(TEXT) };
        let text = text::read(&file)?;
        let vocabulary = self.vocabulary(&text)?;
        let tokens = vocabulary.tokens(&text);
        let (window, held_out) = (self.window as usize, self.held_out as usize);
        let least = held_out + window + 1;
        if tokens.len() < least || held_out <= window {
            let least = least.max(2 * (window + 1));
            return Err(TextError::TooShort { file, tokens: tokens.len(), least }.into());
        }
        info!(file = %file.display(), tokens = tokens.len(), words = vocabulary.size(), "text is read");
        let sizes = Sizes {
            words: vocabulary.size() as i64,
            embedding: i64::from(self.embedding),
            hidden: i64::from(self.hidden),
        };
        Ok(Lm::new(&tokens, Cut { window, held_out }, sizes, source.device))
    }

    /// Reads the vocabulary from its file if there is one, else makes it from the text.
    fn vocabulary(&self, text: &str) -> Result<Vocabulary, TextError> {
        let want = self.words as usize;
        let Some(file) = self.vocabulary.as_deref().filter(|file| file.exists()) else {
            let built = Vocabulary::build(text, want);
            self.vocabulary.as_deref().map_or(Ok(()), |file| built.save(file))?;
            return Ok(built);
        };
        let vocabulary = Vocabulary::open(file)?;
        let found = vocabulary.size();
        // A vocabulary of another size would make another model than the flags say. A text may have fewer words.
        if found != want && found != Vocabulary::build(text, want).size() {
            return Err(TextError::OtherSize { file: file.to_owned(), found, want });
        }
        Ok(vocabulary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vocabulary_of_a_text_with_few_words_is_read_again() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let vocabulary = Some(folder.path().join("words.txt"));
        let args = ModelArgs { words: 10_000, vocabulary, window: 20, held_out: 100, embedding: 8, hidden: 8 };
        let text = "in the beginning was the word";
        let written = args.vocabulary(text).expect("it is written");
        assert_eq!(args.vocabulary(text).expect("it is read"), written);
        let error = args.vocabulary(&format!("{text} , and more")).expect_err("the model would be larger").to_string();
        assert!(error.contains("has 6 words, the model 10000; give --words 6"), "{error}");
    }
}
