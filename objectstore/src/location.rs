//! The place of a folder: a path of the system, or a URL of a bucket, for which the environment has the credentials.

use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use psjobs_ps::checkpoint::{Disk, Folder};

use crate::{Bucket, Objects};

/// Time for a connection to the store.
const CONNECT: Duration = Duration::from_secs(5);
/// Time for one request, which carries a part of a file at most.
const REQUEST: Duration = Duration::from_secs(25);
/// Time in which a request that the store refuses for now is sent again. A failure that lasts longer is reported, and the
/// servers try again later.
const RETRY: Duration = Duration::from_secs(30);
/// More attempts than there can be in that time.
const RETRIES: usize = 1000;
const BACKOFF: BackoffConfig =
    BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };

/// The stores, by the scheme of their URLs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    S3,
    Google,
    Azure,
}

/// A place that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The scheme is that of no store.
    #[error("{url} is of no store that is known; give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER")]
    Scheme { url: String },
    /// No bucket and folder follow the scheme.
    #[error("{url} is no bucket and folder ({problem}); give for example s3://BUCKET/FOLDER")]
    Place { url: String, problem: String },
    /// The environment does not say how to reach the store.
    #[error("{url} cannot be reached: {problem}; {advice}")]
    Settings { url: String, problem: String, advice: &'static str },
    /// This process cannot have tasks.
    #[error("cannot start a thread for {url}: {source}")]
    Thread { url: String, source: std::io::Error },
}

/// A bucket and a folder in it.
struct Opened {
    store: Arc<dyn ObjectStore>,
    /// The URL of the bucket.
    root: String,
    below: Path,
    /// The URL of the folder.
    url: String,
}

/// Returns the folder that a path names, or the URL of an object store. Of a store the settings and credentials are among
/// `variables`, those of an environment. Sends no request.
///
/// # Errors
/// If a URL is not one of a store, or the variables lack something or have something that is wrong.
pub fn folder(place: &str, variables: impl IntoIterator<Item = (String, String)>) -> Result<Folder, LocationError> {
    if !place.contains("://") {
        return Ok(Folder::new(Disk::System, place));
    }
    let Opened { store, root, url, .. } = opened(place, variables)?;
    let bucket = Bucket::new(store, root).map_err(|source| LocationError::Thread { url: url.clone(), source })?;
    Ok(Folder::new(Disk::Other(Arc::new(bucket)), url))
}

/// Returns the objects below the URL of an object store, to be read by ranges. Settings and credentials are as for [`folder`].
///
/// # Errors
/// As [`folder`].
pub fn objects(url: &str, variables: impl IntoIterator<Item = (String, String)>) -> Result<Objects, LocationError> {
    let Opened { store, below, url, .. } = opened(url, variables)?;
    Objects::new(store, below, url.clone()).map_err(|source| LocationError::Thread { url, source })
}

fn opened(place: &str, variables: impl IntoIterator<Item = (String, String)>) -> Result<Opened, LocationError> {
    let (scheme, rest) = place.split_once("://").unwrap_or(("", place));
    // A log shows no credentials.
    let shown = rest.rsplit_once('@').map_or_else(|| place.to_owned(), |(_, rest)| format!("{scheme}://...@{rest}"));
    let url = || shown.clone();
    let kind = match scheme {
        "s3" => Kind::S3,
        "gs" => Kind::Google,
        "az" => Kind::Azure,
        _ => return Err(LocationError::Scheme { url: url() }),
    };
    let wrong = |problem: &str| LocationError::Place { url: url(), problem: problem.to_owned() };
    let (name, below) = rest.split_once('/').unwrap_or((rest, ""));
    if name.is_empty() {
        return Err(wrong("the name of the bucket is empty"));
    }
    if rest.contains(['?', '#', '@']) {
        return Err(wrong("it has one of the letters ?, # and @; credentials belong to the environment"));
    }
    let below = below.trim_end_matches('/');
    let key = Path::parse(below).map_err(|error| wrong(&error.to_string()))?;
    let settings: Vec<_> = variables.into_iter().collect();
    let store = open(kind, name, &settings).map_err(|error| {
        let (problem, advice) = (crate::error::words(&error), kind.advice());
        LocationError::Settings { url: url(), problem, advice }
    })?;
    let root = format!("{scheme}://{name}");
    let url = if below.is_empty() { root.clone() } else { format!("{root}/{below}") };
    Ok(Opened { store, root, below: key, url })
}

impl Kind {
    fn advice(self) -> &'static str {
        match self {
            Self::S3 => {
                "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and AWS_ENDPOINT for a store that is not Amazon's"
            }
            Self::Google => {
                "set GOOGLE_SERVICE_ACCOUNT to the file of a service account's key, or GOOGLE_SERVICE_ACCOUNT_KEY to its text"
            }
            Self::Azure => "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        }
    }
}

/// Returns the store of a bucket, by the settings whose names are known, as `AWS_REGION`.
fn open(kind: Kind, name: &str, settings: &[(String, String)]) -> object_store::Result<Arc<dyn ObjectStore>> {
    // HTTPS to the store uses the cryptography of the servers' connections.
    drop(psjobs_ps::tls::cryptography());
    let retry = RetryConfig { backoff: BACKOFF, retry_timeout: RETRY, max_retries: RETRIES };
    let prefix = match kind {
        Kind::S3 => "AWS_",
        Kind::Google => "GOOGLE_",
        Kind::Azure => "AZURE_",
    };
    let own = settings.iter().filter(|(name, _)| name.starts_with(prefix));
    // A store that is given by http:// is one of the same machine or network. The address of Google's may be in the key of
    // the service account.
    let plain = own.clone().any(|(_, value)| value.contains("http://"));
    let client = ClientOptions::new().with_connect_timeout(CONNECT).with_timeout(REQUEST).with_allow_http(plain);
    let own = own.map(|(name, value)| (name.to_ascii_lowercase(), value.clone()));
    Ok(match kind {
        Kind::S3 => {
            let builder = own.fold(AmazonS3Builder::new().with_client_options(client), |builder, (name, value)| {
                match AmazonS3ConfigKey::from_str(&name) {
                    Ok(key) => builder.with_config(key, value),
                    Err(_) => builder,
                }
            });
            Arc::new(builder.with_bucket_name(name).with_retry(retry).build()?)
        }
        Kind::Google => {
            let builder =
                own.fold(GoogleCloudStorageBuilder::new().with_client_options(client), |builder, (name, value)| {
                    match GoogleConfigKey::from_str(&name) {
                        Ok(key) => builder.with_config(key, value),
                        Err(_) => builder,
                    }
                });
            Arc::new(builder.with_bucket_name(name).with_retry(retry).build()?)
        }
        Kind::Azure => {
            let builder =
                own.fold(MicrosoftAzureBuilder::new().with_client_options(client), |builder, (name, value)| {
                    match AzureConfigKey::from_str(&name) {
                        Ok(key) => builder.with_config(key, value),
                        Err(_) => builder,
                    }
                });
            Arc::new(builder.with_container_name(name).with_retry(retry).build()?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_path_or_a_url() {
        for place in ["checkpoints", "/mnt/checkpoints/mnist", "s3.d/x"] {
            let folder = folder(place, []).expect("a path");
            assert_eq!((folder.disk(), &*folder), (&Disk::System, std::path::Path::new(place)));
        }
        for (url, path) in [
            ("s3://bucket/jobs/mnist", "s3://bucket/jobs/mnist"),
            ("s3://bucket/jobs/", "s3://bucket/jobs"),
            ("s3://bucket", "s3://bucket"),
            ("gs://bucket/jobs", "gs://bucket/jobs"),
        ] {
            let folder = folder(url, []).expect("a bucket");
            assert_eq!(folder.display().to_string(), path);
            assert!(*folder.disk() != Disk::System);
        }
    }

    #[test]
    fn a_url_that_cannot_be_used_says_why() {
        for (url, said) in [
            ("http://bucket/x", "give s3://BUCKET/FOLDER"),
            ("https://user:secret@bucket/x", "https://...@bucket/x"),
            ("s3:///x", "the name of the bucket is empty"),
            ("s3://bucket/a//b", "no bucket and folder"),
            ("s3://bucket/../b", "no bucket and folder"),
            ("s3://key:secret@bucket/x", "credentials belong to the environment"),
            ("az://container/x", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ] {
            let error = folder(url, []).expect_err(url).to_string();
            assert!(error.contains(said) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn a_bucket_that_is_opened_first_chooses_the_cryptography_of_connections() {
        folder("s3://bucket", []).expect("a bucket");
        // This would not choose again.
        let first = psjobs_ps::tls::cryptography().cipher_suites[0].suite();
        assert_eq!(first.as_str(), Some("TLS13_AES_128_GCM_SHA256"));
    }

    #[test]
    fn settings_reach_the_store() {
        let set = |settings: &[(&str, &str)]| -> Vec<(String, String)> {
            settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let s3 = set(&[("AWS_ENDPOINT", "http://127.0.0.1:1"), ("AWS_REGION", "eu-west-1"), ("AWS_UNKNOWN", "x")]);
        let store = format!("{:?}", open(Kind::S3, "b", &s3).expect("a store"));
        assert!(store.contains("http://127.0.0.1:1") && store.contains("eu-west-1"), "{store}");
        let google = open(Kind::Google, "b", &set(&[("GOOGLE_SERVICE_ACCOUNT", "/no/such/file")]));
        assert!(google.is_err_and(|error| error.to_string().contains("/no/such/file")));
    }
}
