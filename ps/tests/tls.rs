//! Jobs that talk mutual TLS: those with a certificate of the job's authority train, others are not heard.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{ClientError, Session};
use psjobs_ps::network::Network;
use psjobs_ps::tls::{Credentials, NAME};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::*;

/// Certificates of an authority of their own.
fn certificates(folder: &Path) -> Network {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key")).expect("an authority");
    let key = KeyPair::generate().expect("a key");
    let process = CertificateParams::new([NAME.to_owned()]).expect("a name");
    let certificate = process.signed_by(&key, &authority).expect("signed");
    for (name, text) in [("ca.crt", authority.pem()), ("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem())]
    {
        fs::write(folder.join(name), text).expect("written");
    }
    Network::Tls(Arc::new(Credentials::load(folder).expect("usable")))
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_with_a_certificate_of_the_jobs_authority_train() {
    let (ours, theirs) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (ours, theirs) = (certificates(ours.path()), certificates(theirs.path()));
    // Both servers talk TLS with each other too.
    let listeners = [listen().await, listen().await];
    let addresses: Vec<String> = listeners.iter().map(|l| l.local_addr().expect("bound").to_string()).collect();
    let servers: Vec<_> = (0..)
        .zip(listeners)
        .map(|(index, listener)| {
            let mut config = config(index, 2, 1, ConsistencyMode::Sync);
            config.network = ours.clone();
            config.replicas = addresses.clone();
            start_on(listener, config)
        })
        .collect();
    let join = |network: Network, patience: u64| {
        let mut config = session_config(0, addresses.clone());
        (config.network, config.replication_factor) = (network, 2);
        config.connect_timeout = Duration::from_secs(patience);
        tokio::task::spawn_blocking(move || Session::join(config, &vec![1.0; elements()]))
    };
    for (label, network) in [("another authority", theirs), ("no certificate", Network::Tcp)] {
        let refused = join(network, 1).await.expect("no panic").map(drop).expect_err(label);
        assert!(matches!(refused, ClientError::Unreachable { .. }), "{label}: {refused}");
    }
    let session = join(ours, 20).await.expect("no panic").expect("joins");
    let trained = tokio::task::spawn_blocking(move || {
        let (session, parameters) = train(session, 0, 5);
        session.leave(true, 0, BTreeMap::new()).expect("leaves");
        parameters
    });
    let parameters = trained.await.expect("no panic");
    assert!(parameters.iter().all(|value| value.is_finite()) && parameters[0] != 1.0, "it has learnt something");
    for server in servers {
        server.ended.await.expect("no panic").expect("ends well");
    }
}
