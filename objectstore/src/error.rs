//! Errors of a store as those of a disk, with the store's own words.

use std::error::Error;
use std::io::{self, ErrorKind};

/// The most characters of a store's words; some answer with a page.
const LONGEST: usize = 400;

/// Words of stores that have no such bucket: S3's, Google's and Azure's.
const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "bucket does not exist", "ContainerNotFound"];

/// Words of stores that refuse a request for its credentials, where the client does not tell.
const NO_RIGHTS: [&str; 2] = ["403 Forbidden", "401 Unauthorized"];

/// Words of stores that refuse a request because there are too many.
const TOO_MANY: [&str; 4] = ["503 Service Unavailable", "429 Too Many Requests", "SlowDown", "ServerBusy"];

/// Returns the error of a disk that tells the same. `AlreadyExists` is what a conditional request has found; an object of a
/// bucket that is not there is not missing, but out of reach.
pub fn of_disk(error: object_store::Error) -> io::Error {
    use object_store::Error as Store;
    let words = all_words(&error);
    let says = |all: &[&str]| all.iter().any(|said| words.contains(said));
    let has_no_bucket = says(&NO_BUCKET);
    let kind = match &error {
        _ if has_no_bucket => ErrorKind::Other,
        _ if says(&NO_RIGHTS) => ErrorKind::PermissionDenied,
        Store::NotFound { .. } => ErrorKind::NotFound,
        Store::AlreadyExists { .. } => ErrorKind::AlreadyExists,
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => ErrorKind::PermissionDenied,
        _ => ErrorKind::Other,
    };
    let advice = match kind {
        ErrorKind::PermissionDenied => {
            "; check the credentials of the store, in the environment, or of checkpoints in spec.checkpoint.objectStore.secret"
        }
        _ if has_no_bucket => "; create the bucket, or correct its name",
        _ if says(&TOO_MANY) => {
            "; the store refuses requests for now; for checkpoints a longer spec.checkpoint.intervalSeconds sends fewer of them"
        }
        _ => "",
    };
    io::Error::new(kind, format!("{}{advice}", shortened(&words)))
}

/// Returns the words of a store in one line, not too long.
pub fn words(error: &dyn Error) -> String {
    shortened(&all_words(error))
}

/// Returns all words of a store: those of inner causes, too, if the others do not have them.
fn all_words(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let said = inner.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = inner.source();
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn shortened(line: &str) -> String {
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_kind_and_the_words_of_the_store() {
        let source = || "503 Slow\n   Down".into();
        for (error, kind, said) in [
            (object_store::Error::NotFound { path: "a/b".into(), source: source() }, ErrorKind::NotFound, "a/b"),
            (object_store::Error::AlreadyExists { path: "a".into(), source: source() }, ErrorKind::AlreadyExists, "a"),
            (
                object_store::Error::PermissionDenied { path: "a".into(), source: source() },
                ErrorKind::PermissionDenied,
                "check the credentials",
            ),
            (object_store::Error::Generic { store: "S3", source: source() }, ErrorKind::Other, "503 Slow Down"),
            (
                object_store::Error::Generic { store: "S3", source: "503 Service Unavailable".into() },
                ErrorKind::Other,
                "for checkpoints a longer spec.checkpoint.intervalSeconds sends fewer of them",
            ),
            (
                object_store::Error::NotFound { path: "a".into(), source: "<Code>NoSuchBucket</Code>".into() },
                ErrorKind::Other,
                "create the bucket",
            ),
        ] {
            let error = of_disk(error);
            assert_eq!(error.kind(), kind);
            assert!(error.to_string().contains(said), "{error}");
        }
        let page = object_store::Error::Generic { store: "S3", source: "ä".repeat(5000).into() };
        assert!(of_disk(page).to_string().chars().count() <= LONGEST + 3);
    }
}
