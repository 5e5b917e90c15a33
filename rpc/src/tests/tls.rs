//! Processes that show each other certificates, in both directions of a call.

use std::fs;
use std::sync::Arc;

use psjobs_api::Role;
use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_ps::network::Network;
use psjobs_ps::tls::Credentials;

use super::*;

/// The network of a process that shows the certificate of `role`.
fn network(certificates: &Certificates, role: Role) -> Network {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in certificates.files(role) {
        fs::write(folder.path().join(name), text).expect("written");
    }
    Network::Tls(Arc::new(Credentials::load(folder.path()).expect("usable")))
}

/// Returns what makes the settings of a process by its name and role, with certificates of one authority.
fn settings_of_one_job() -> impl Fn(&str, Role) -> Settings {
    let certificates = Certificates::make(&[], std::time::SystemTime::now(), LIFE).expect("no names are wrong");
    move |name, role| Settings { network: network(&certificates, role), ..Settings::new(name, "test") }
}

#[test]
fn a_trainer_passes_for_no_server() {
    let settings = settings_of_one_job();
    let mut job = Job::new();
    let server = job.start(settings("ps-0", Role::Server));
    let address = job.serve(&server);
    // A trainer that calls itself a server is refused where it connects.
    let liar = job.start(settings("ps-1", Role::Trainer));
    let error = liar.connect("ps-0", &address, TIMEOUT).map(drop).expect_err("it is no server").to_string();
    assert!(error.contains("the name ps-1 needs the certificate of a server"), "{error}");
    // It is not taken for one where it is connected to.
    let false_address = job.serve(&liar);
    let trainer = job.start(settings("trainer-0", Role::Trainer));
    let unreachable = || {
        let tried = trainer.connect("ps-1", &false_address, Duration::from_secs(1));
        tried.map(drop).expect_err("it is no server").to_string()
    };
    eventually("its certificate is refused", || unreachable().contains("not valid for name \"ps.psjob\""));
    let server = trainer.connect("ps-0", &address, TIMEOUT).expect("a trainer calls servers");
    assert_eq!(server.rpc_sync::<i64>("echo", 7_i64).expect("answered"), 7);
}

#[test]
fn a_trainer_that_others_call_asks_for_certificates_too() {
    let settings = settings_of_one_job();

    let mut job = Job::new();
    let server = job.start(settings("ps-0", Role::Server));
    let address = job.serve(&server);
    let (agent, observer) =
        (job.start(settings("trainer-0", Role::Trainer)), job.start(settings("trainer-1", Role::Trainer)));
    let known = agent.connect("ps-0", &address, TIMEOUT).expect("the server is up");
    agent.publish(&known, &address).expect("it listens");

    let known = observer.connect("ps-0", &address, TIMEOUT).expect("the server is up");
    let found = observer.connect_published(&known, "trainer-0", TIMEOUT).expect("the agent lets it in");
    assert_eq!(found.rpc_sync::<i64>("echo", 7_i64).expect("answered"), 7);

    let plain = job.start(Settings::new("trainer-2", "test"));
    let agents = observer.locate(&known, "trainer-0", TIMEOUT).expect("it was published");
    let refused = plain.connect("trainer-0", &agents, Duration::from_millis(300)).map(drop);
    let error = refused.expect_err("it shows nothing");
    assert!(matches!(error, RemoteError::Unreachable { .. }), "{error}");
}
