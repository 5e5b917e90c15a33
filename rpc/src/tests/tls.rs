//! Processes that show each other certificates, in both directions of a call.

use std::fs;
use std::sync::Arc;

use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_ps::network::Network;
use psjobs_ps::tls::Credentials;

use super::*;

#[test]
fn a_trainer_that_others_call_asks_for_certificates_too() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in Certificates::make(&[], std::time::SystemTime::now(), LIFE).expect("no names are wrong").files()
    {
        fs::write(folder.path().join(name), text).expect("written");
    }
    let network = Network::Tls(Arc::new(Credentials::load(folder.path()).expect("usable")));
    let settings = |name: &str| Settings { network: network.clone(), ..Settings::new(name, "test") };

    let mut job = Job::new();
    let server = job.start(settings("ps-0"));
    let address = job.serve(&server);
    let (agent, observer) = (job.start(settings("trainer-0")), job.start(settings("trainer-1")));
    let known = agent.connect("ps-0", &address, PATIENCE).expect("the server is up");
    agent.publish(&known, &address).expect("it listens");

    let known = observer.connect("ps-0", &address, PATIENCE).expect("the server is up");
    let found = observer.connect_published(&known, "trainer-0", PATIENCE).expect("the agent lets it in");
    assert_eq!(found.rpc_sync::<i64>("echo", 7_i64).expect("answered"), 7);

    let plain = job.start(Settings::new("trainer-2", "test"));
    let agents = observer.locate(&known, "trainer-0", PATIENCE).expect("it was published");
    let refused = plain.connect("trainer-0", &agents, Duration::from_millis(300)).map(drop);
    let error = refused.expect_err("it shows nothing");
    assert!(matches!(error, RemoteError::Unreachable { .. }), "{error}");
}
