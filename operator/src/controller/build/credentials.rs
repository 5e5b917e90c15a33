//! Gives a server's container the credentials of a store or of a tracking server.

use k8s_openapi::api::core::v1::{Container, EnvFromSource, SecretEnvSource};

/// Makes the keys of the Secret `name` variables of a container. Those of the template count more. The operator does not
/// read the Secret.
pub fn give(main: &mut Container, name: &str) {
    let secret_ref = Some(SecretEnvSource { name: name.to_owned(), optional: None });
    let credentials = EnvFromSource { secret_ref, ..EnvFromSource::default() };
    // The last one of two sources with the same variable counts.
    main.env_from.get_or_insert_default().insert(0, credentials);
}
