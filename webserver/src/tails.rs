//! Reads the last lines of a job's pods for its record.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::time::Duration;

use futures::future::join_all;
use futures::{AsyncRead, AsyncReadExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use kubectl_psjob::web::TAIL;
use kubectl_psjob::web::facts::PodFacts;
use psjobs_web::record::last;

use crate::recorder::Tails;

/// Processes whose logs are kept; those that are not well come first.
const PROCESSES: usize = 200;
/// Logs that are read at once, bytes that are kept of all, and bytes of one that come at once.
const AT_ONCE: usize = 8;
const KEPT: usize = 1 << 20;
const PIECE: usize = 16 << 10;
const DEADLINE: Duration = Duration::from_secs(10);

/// Returns the last lines of each pod whose log can be read.
pub async fn read(api: &Api<Pod>, pods: Vec<PodFacts>) -> Tails {
    let chosen = choose(pods);
    let share = KEPT / chosen.len().max(1);
    let mut tails = Tails::new();
    for some in chosen.chunks(AT_ONCE) {
        let read = join_all(some.iter().map(|pod| read_one(api, pod, share))).await;
        for (pod, text) in some.iter().zip(read) {
            if let Some(text) = text.filter(|text| !text.is_empty()) {
                tails.insert(pod.process(), last(&text, share).to_owned());
            }
        }
    }
    tails
}

/// Returns the end of a pod's log: the whole of the last lines if they have at most `most` bytes, else a little more than that.
async fn read_one(api: &Api<Pod>, pod: &PodFacts, most: usize) -> Option<String> {
    // A limit of bytes would leave out the end, where the error is.
    let wanted = LogParams { container: pod.container.clone(), tail_lines: Some(TAIL), ..LogParams::default() };
    let read = async {
        let log = api.log_stream(&pod.name, &wanted).await.ok()?;
        end(pin!(log), most + 1).await.ok()
    };
    // The log of a pod that is gone is gone.
    let bytes = tokio::time::timeout(DEADLINE, read).await.ok()??;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the last bytes of a log, at most `most`. Twice that and a piece have room in memory.
async fn end(mut log: impl AsyncRead + Unpin, most: usize) -> io::Result<Vec<u8>> {
    let (mut kept, mut piece) = (Vec::new(), vec![0; PIECE]);
    loop {
        let count = log.read(&mut piece).await?;
        kept.extend_from_slice(&piece[..count]);
        let surplus = kept.len().saturating_sub(most);
        if count == 0 || surplus > most {
            kept.drain(..surplus);
        }
        if count == 0 {
            return Ok(kept);
        }
    }
}

/// Returns the newest pod of each process that has run, at most [`PROCESSES`].
fn choose(mut pods: Vec<PodFacts>) -> Vec<PodFacts> {
    pods.sort_by_key(|pod| pod.created);
    let newest: BTreeMap<_, _> = pods.into_iter().map(|pod| ((pod.role, pod.index), pod)).collect();
    let mut chosen: Vec<PodFacts> = newest.into_values().filter(|pod| pod.run.is_some()).collect();
    chosen.sort_by_key(|pod| pod.is_well);
    chosen.truncate(PROCESSES);
    chosen
}

#[cfg(test)]
mod tests {
    use psjobs_api::Role;
    use psjobs_web::job::Run;

    use super::*;

    fn pod(index: u32, created: u64, is_well: bool) -> PodFacts {
        let name = format!("mnist-trainer-{index}");
        let run = Some(Run { from: created, to: None, failed: false });
        let (node, container, state) = (None, None, String::new());
        PodFacts {
            role: Role::Trainer,
            index,
            uid: created.to_string(),
            name,
            container,
            created,
            node,
            ip: None,
            state,
            is_well,
            run,
        }
    }

    #[tokio::test]
    async fn the_end_of_a_log_is_kept() {
        let long: Vec<u8> = (0..3 * PIECE).map(|number| number as u8).collect();
        for (log, most) in [
            (&b""[..], 4),
            (&b"abc"[..], 4),
            (&b"abcd"[..], 4),
            (&b"abcde"[..], 4),
            (&long[..], 10),
            (&long[..], PIECE + 1),
        ] {
            let wanted = &log[log.len().saturating_sub(most)..];
            assert_eq!(end(log, most).await.expect("it can be read"), wanted, "{} bytes, {most}", log.len());
        }
    }

    #[test]
    fn the_newest_pod_of_each_process_is_read_and_those_that_are_not_well_first() {
        let waits = PodFacts { run: None, ..pod(3, 9, false) };
        let chosen = choose(vec![pod(0, 5, true), pod(1, 7, false), pod(0, 2, false), waits]);
        assert_eq!(chosen.iter().map(|pod| pod.uid.as_str()).collect::<Vec<_>>(), ["7", "5"]);
        let many = (0..500).map(|index| pod(index, 1, index != 400)).collect();
        let chosen = choose(many);
        assert_eq!((chosen.len(), chosen[0].index), (PROCESSES, 400));
    }
}
