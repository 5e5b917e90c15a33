//! A client in another language, with nothing of ours but the `.proto` files. Needs Python's grpcio, which
//! `make test-foreign` fetches.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::{addresses, start_all};
use psjobs_api::training::ConsistencyMode;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs grpcio: make test-foreign"]
async fn a_plain_python_client_trains_and_learns_what_it_does_wrong() {
    let servers = start_all(2, 2, ConsistencyMode::Sync).await;
    let addresses = addresses(&servers);
    tokio::task::spawn_blocking(move || {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let stubs = tempfile::tempdir().expect("a folder");
        run(Command::new("python3")
            .args(["-m", "grpc_tools.protoc", "-I", "proto"])
            .arg(format!("--python_out={}", stubs.path().display()))
            .arg(format!("--grpc_python_out={}", stubs.path().display()))
            .args(["coordination", "exchange", "leadership"].map(|file| format!("psjobs/v1/{file}.proto")))
            .current_dir(package));
        let grpcio = std::env::var("PYTHONPATH").unwrap_or_default();
        run(Command::new("python3")
            .arg(package.join("tests/foreign_client/client.py"))
            .args(addresses)
            .env("PYTHONPATH", format!("{}:{grpcio}", stubs.path().display())));
    })
    .await
    .expect("the client succeeds");
    for server in servers {
        let result = server.ended.await.expect("no panic").expect("every trainer has left");
        assert_eq!((result.steps, result.examples), (16, 80));
    }
}

fn run(command: &mut Command) {
    let Output { status, stdout, stderr } = command.output().expect("python3 is installed");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}{stderr}");
    print!("{stdout}");
}
