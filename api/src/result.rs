//! The result that a process of a job leaves when it ends: one JSON object, written to the file that
//! `PSJOB_RESULT_FILE` names. In a pod that is the termination message, so it is bounded to 4 KiB.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::index_ranges;

/// A server's or a trainer's last words after it did its work. A process that fails leaves the
/// file empty: its last log lines show more.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaResult {
    /// Steps done: by this trainer, or on a server the sum over all trainers.
    pub steps: u64,
    /// Examples read by this trainer, or on a server the sum over all trainers.
    pub examples: u64,
    /// Seconds from the first step to the last.
    pub seconds: f64,
    /// Trainer only: seconds of `seconds` spent waiting for servers, other trainers and the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_seconds: Option<f64>,
    /// Final metrics by name, for instance `accuracy` and `loss`. On a server: what the trainers
    /// reported when they left; of trainers that report the same name the one of lowest index counts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Server only: the incarnations of the trainers that left well, each with the indexes of those trainers as ranges;
    /// nothing in an elastic job.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left: BTreeMap<u32, String>,
    /// Server 0 only: the newest checkpoint that it has written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointResult>,
    /// Server 0 only: the file of the trained model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Server only: the bytes of the connections that it has accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
}

/// The bytes that connections have carried, with all headers. Payloads in shared memory are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// To the server.
    pub received: u64,
    /// From the server.
    pub sent: u64,
}

/// A checkpoint that is complete.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointResult {
    /// Step that it was taken at.
    pub step: u64,
    /// Its folder, as the server sees it.
    pub path: String,
    /// When it was complete, in seconds since 1970.
    pub unix_seconds: u64,
}

impl ReplicaResult {
    /// Longest file that Kubernetes keeps as a termination message.
    pub const MAX_BYTES: usize = 4096;

    /// Reads a result; `None` where the text is not one (an empty file, a log tail).
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The JSON to write, at most [`Self::MAX_BYTES`]: metrics are dropped from the end if need be, and then incarnations.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut result = self.clone();
        loop {
            let json = serde_json::to_string(&result).expect("numbers and strings serialize");
            let fits = json.len() <= Self::MAX_BYTES;
            if fits || result.metrics.pop_last().is_none() && result.left.pop_last().is_none() {
                return json;
            }
        }
    }

    /// Returns the incarnation with which `trainer` left well, if this is the result of a server that knows it.
    #[must_use]
    pub fn left_as(&self, trainer: u32) -> Option<u32> {
        let has_left = |ranges: &str| index_ranges::parse(ranges).any(|index| index == trainer);
        self.left.iter().find(|(_, ranges)| has_left(ranges)).map(|(&incarnation, _)| incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_survives_the_round_trip_and_a_log_tail_is_none() {
        let result = ReplicaResult {
            steps: 938,
            examples: 30_016,
            seconds: 31.5,
            waiting_seconds: Some(1.25),
            metrics: [("accuracy".to_owned(), 0.981)].into(),
            left: [(0, "0,2-7".to_owned()), (3, "1".to_owned())].into(),
            checkpoint: Some(CheckpointResult {
                step: 938,
                path: "/checkpoints/938".into(),
                unix_seconds: 1_763_740_800,
            }),
            model: Some("/checkpoints/model.safetensors".into()),
            traffic: Some(Traffic { received: 1 << 40, sent: 7 }),
        };
        assert_eq!(ReplicaResult::parse(&result.to_json()), Some(result.clone()));
        assert_eq!([0, 1, 7, 8].map(|trainer| result.left_as(trainer)), [Some(0), Some(3), Some(0), None]);
        assert_eq!(ReplicaResult::parse("Error: no such file"), None);
        assert_eq!(ReplicaResult::parse(""), None);
    }

    #[test]
    fn many_metrics_are_cut_to_what_a_termination_message_holds() {
        let metrics = (0..500).map(|i| (format!("metric-{i:03}"), f64::from(i))).collect();
        let json = ReplicaResult { metrics, ..ReplicaResult::default() }.to_json();
        assert!(json.len() <= ReplicaResult::MAX_BYTES);
        assert!(json.contains("metric-000"));
        let left = (0..500).map(|trainer| (trainer, trainer.to_string())).collect();
        let json = ReplicaResult { left, ..ReplicaResult::default() }.to_json();
        assert!(json.len() <= ReplicaResult::MAX_BYTES);
        assert_eq!(ReplicaResult::parse(&json).and_then(|result| result.left_as(100)), Some(100));
    }
}
