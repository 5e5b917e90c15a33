//! Checks the YAML of the documents: whole jobs with `psjobs validate`, fragments as YAML.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A fenced block of YAML in a document.
struct Snippet {
    file: PathBuf,
    line: usize,
    text: String,
}

impl Snippet {
    fn place(&self) -> String {
        format!("{}:{}", self.file.display(), self.line)
    }

    fn is_job(&self) -> bool {
        self.text.lines().any(|line| line.trim_end() == "kind: ParameterServerJob")
    }
}

/// Returns the YAML of the README, CONTRIBUTING, docs/ and the chart's README.
fn snippets() -> Vec<Snippet> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = fs::read_dir(root.join("docs")).expect("docs/ is there").map(|entry| entry.expect("an entry").path());
    let mut files = ["README.md", "CONTRIBUTING.md", "charts/psjobs/README.md"].map(|name| root.join(name)).to_vec();
    files.extend(docs.filter(|file| file.extension().is_some_and(|extension| extension == "md")));
    files.sort();
    files.into_iter().flat_map(|file| yaml_of(&file)).collect()
}

fn yaml_of(file: &Path) -> Vec<Snippet> {
    let text = fs::read_to_string(file).expect("a document is readable");
    let mut snippets = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        if line.trim() == "```yaml" {
            let block: Vec<_> = lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim() != "```").collect();
            snippets.push(Snippet { file: file.to_owned(), line: index + 2, text: block.join("\n") + "\n" });
        }
    }
    snippets
}

#[test]
fn jobs_in_documents_are_valid() {
    let jobs: Vec<_> = snippets().into_iter().filter(Snippet::is_job).collect();
    assert!(!jobs.is_empty(), "the README has a job");
    let folder = tempfile::tempdir().expect("a temporary folder");
    for job in jobs {
        let file = folder.path().join("job.yaml");
        fs::write(&file, &job.text).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs"));
        let output = command.arg("validate").arg(&file).output().expect("psjobs runs");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", job.place());
    }
}

#[test]
fn fragments_in_documents_are_yaml() {
    for fragment in snippets() {
        let parsed = serde_yaml::from_str::<serde_yaml::Value>(&fragment.text);
        assert!(parsed.is_ok_and(|value| value.is_mapping()), "{} is no YAML of fields", fragment.place());
    }
}
