//! Whatever text a manifest is: jobs that can be used, or sentences that say what must change and where.
#![no_main]

#[allow(dead_code)]
#[path = "../../cli/src/manifest/mod.rs"]
mod manifest;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match manifest::check(text) {
        Ok(manifest) => {
            assert!(!manifest.jobs.is_empty());
            for job in &manifest.jobs {
                job.spec.training.validate().expect("what passes the schema can be trained");
                // What was read is written so that it is read again.
                let again = serde_json::to_string(job).expect("a job is JSON");
                manifest::check(&again).expect("a job that was written passes");
            }
        }
        Err(problems) => {
            assert!(!problems.is_empty());
            let lines = text.lines().count().max(1);
            for problem in problems {
                assert!(!problem.message.is_empty(), "{problem:?}");
                assert!(problem.line.is_none_or(|line| (1..=lines + 1).contains(&line)), "{problem:?}");
            }
        }
    }
});
