//! The manifest of `psjobs run -- COMMAND`: a job whose trainers run any command, with the defaults of the definition.

use std::ffi::OsString;
use std::path::Path;

use serde_json::{Value, json};

use crate::bad_input::BadInput;

/// The replicas of a job that has no manifest.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub trainers: u32,
    pub servers: u32,
    /// GPUs of each trainer.
    pub gpus: u32,
}

/// Returns the document of a job whose trainers run `command`.
///
/// # Errors
/// [`BadInput`] if an argument is not UTF-8.
pub fn document(command: &[OsString], size: Size) -> Result<Value, BadInput> {
    let mut words = Vec::new();
    for argument in command {
        let word = argument.to_str().ok_or_else(|| BadInput::new(format!("{argument:?} is not UTF-8; rename it")))?;
        words.push(word);
    }
    // A manifest expands $(NAME); $$ stands for one $.
    let escaped: Vec<_> = words.iter().map(|word| word.replace('$', "$$")).collect();
    let container = json!({"name": "trainer", "command": escaped});
    Ok(json!({
        "apiVersion": "psjobs.dev/v1alpha1",
        "kind": "ParameterServerJob",
        "metadata": {"name": name(&words)},
        "spec": {
            "ps": {"replicas": size.servers},
            "trainer": {"replicas": size.trainers, "gpus": size.gpus, "template": {"spec": {"containers": [container]}}},
        },
    }))
}

/// Returns a job's name for a command: that of the first script in it, else of the program.
fn name(words: &[&str]) -> String {
    let script = words.iter().skip(1).find(|word| !word.starts_with('-') && Path::new(word).extension().is_some());
    let word = script.or(words.first()).copied().unwrap_or_default();
    let stem = Path::new(word).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let letters: String = stem
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' })
        .collect();
    let name: String = letters.trim_matches('-').chars().take(40).collect();
    match name.trim_end_matches('-') {
        "" => "command".to_owned(),
        // A name of a Service, as the servers' is, begins with a letter.
        name if name.starts_with(|first: char| first.is_ascii_digit()) => format!("job-{name}"),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_named_after_its_script() {
        for (words, expected) in [
            (&["python3", "train.py"][..], "train"),
            (&["python", "-u", "src/train_GPT.v2.py", "--data", "x.txt"], "train-gpt-v2"),
            (&["python", "-m", "trainer.main"], "trainer"),
            (&["./1st"], "job-1st"),
            (&["./--"], "command"),
        ] {
            assert_eq!(name(words), expected, "{words:?}");
        }
    }

    #[test]
    fn arguments_reach_the_command_as_they_were_typed() {
        let size = Size { trainers: 2, servers: 1, gpus: 1 };
        let document = document(&["sh".into(), "-c".into(), "echo $HOME $(id) $$".into()], size).expect("a document");
        assert_eq!(document["spec"]["trainer"]["gpus"], 1);
        let container = &document["spec"]["trainer"]["template"]["spec"]["containers"][0];
        assert_eq!(container["command"][2], "echo $$HOME $$(id) $$$$");
    }
}
