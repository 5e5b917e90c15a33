//! Runs `psjobs bench` on machines that lack the device to measure.

use std::process::Command;

#[test]
fn without_a_gpu_there_is_nothing_to_measure_and_that_is_no_error() {
    for json in [&[][..], &["--json"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs-bench"));
        // As on a machine without one.
        let output = command.arg("gpu").args(json).env("CUDA_VISIBLE_DEVICES", "").output();
        let output = output.expect("the program starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("no CUDA device"), "{said}");
        assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    }
}
