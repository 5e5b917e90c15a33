//! The servers that ask server 0 to be restored, in the order in which they come; also while it waits for the answer of one
//! that will never answer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::pending;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::server::state::recovery::Newcomer;

/// Time after which a request has reached a process, if there is one: making a connection takes half of it at most.
const REACHED: Duration = Duration::from_secs(10);

/// The servers that have asked to be restored.
pub(super) struct Arrivals {
    queue: mpsc::Receiver<Newcomer>,
    /// Processes that have come and were not answered yet.
    waiting: VecDeque<Newcomer>,
    /// By server: the processes that have asked to be restored, or were.
    heard: BTreeMap<u32, BTreeSet<u64>>,
}

impl Arrivals {
    pub fn new(queue: mpsc::Receiver<Newcomer>) -> Self {
        Self { queue, waiting: VecDeque::new(), heard: BTreeMap::new() }
    }

    /// Returns the next one to answer. One that has disconnected asks again, if it lives.
    pub async fn next(&mut self) -> Option<Newcomer> {
        loop {
            if self.waiting.is_empty() && !self.wait().await {
                return None;
            }
            if let Some(newcomer) = self.waiting.pop_front()
                && !newcomer.done.is_closed()
            {
                return Some(newcomer);
            }
        }
    }

    /// Waits until another one comes, and leaves it to [`Arrivals::next`]. Returns false if none can come any more.
    pub async fn wait(&mut self) -> bool {
        let Some(newcomer) = self.queue.recv().await else { return false };
        self.keep(newcomer);
        true
    }

    /// Takes note of all that have come, before servers are asked: they are the processes that will be asked.
    pub fn take_in(&mut self) {
        while let Ok(newcomer) = self.queue.try_recv() {
            self.keep(newcomer);
        }
    }

    /// Takes note of a process that was restored.
    pub fn hear(&mut self, server: u32, instance: u64) {
        self.heard.entry(server).or_default().insert(instance);
    }

    /// Waits until a process has taken the place of one that was asked to restore and has not answered, and returns its server.
    /// `asked_for` returns how long ago a server was asked, if its answer is awaited.
    pub async fn replacement(&mut self, asked_for: impl Fn(u32) -> Option<Duration>) -> u32 {
        while let Some(newcomer) = self.queue.recv().await {
            let server = newcomer.server;
            let replaces = replaces(self.heard.get(&server), newcomer.instance, asked_for(server));
            self.keep(newcomer);
            if replaces {
                return server;
            }
        }
        pending().await
    }

    fn keep(&mut self, newcomer: Newcomer) {
        self.hear(newcomer.server, newcomer.instance);
        self.waiting.push_back(newcomer);
    }
}

/// Decides whether the process `instance` of a server has taken the place of the one that was asked `asked_for` ago, and whose
/// answer is awaited. If other processes of the server were `heard` of, one of them may have been asked; a round more than is
/// needed does no harm. If none was, a process that has just started may be asked before it is heard of, but not long before.
fn replaces(heard: Option<&BTreeSet<u64>>, instance: u64, asked_for: Option<Duration>) -> bool {
    match (heard, asked_for) {
        // No process was reached yet, or the answer has come: the next request goes to the new process.
        (_, None) => false,
        (Some(heard), Some(_)) => !heard.contains(&instance),
        (None, Some(asked_for)) => asked_for >= REACHED,
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_process_replaces_another_one_that_was_asked_and_does_not_answer() {
        for (label, heard, asked_for, want) in [
            ("at the start of a job", None, Some(SECOND), false),
            ("after a server 0 that had heard of the one before", None, Some(REACHED), true),
            ("a new process", Some(vec![1, 2]), Some(SECOND), true),
            ("it asks again", Some(vec![1, 7]), Some(60 * SECOND), false),
            ("it is asked when it listens", Some(vec![1]), None, false),
            ("no process is asked", None, None, false),
        ] {
            let heard = heard.map(BTreeSet::from_iter);
            assert_eq!(replaces(heard.as_ref(), 7, asked_for), want, "{label}");
        }
    }

    #[tokio::test]
    async fn each_process_is_heard_of_once_and_answered_in_order_if_it_still_asks() {
        let (sender, queue) = mpsc::channel(8);
        let mut arrivals = Arrivals::new(queue);
        let mut answers = Vec::new();
        for instance in [5, 6, 5, 7] {
            let (done, answer) = oneshot::channel();
            assert!(sender.try_send(Newcomer { server: 1, instance, given: false, epoch: 0, done }).is_ok());
            answers.push(answer);
        }
        for _ in 0..2 {
            assert_eq!(arrivals.replacement(|_| Some(SECOND)).await, 1, "6 for 5, and 7 for both");
        }
        // The process that was the first does not ask any more.
        drop(answers.remove(0));
        let mut next = Vec::new();
        while !arrivals.waiting.is_empty() {
            next.extend(arrivals.next().await.map(|newcomer| newcomer.instance));
        }
        assert_eq!(next, [6, 5, 7]);
        drop(sender);
        assert!(!arrivals.wait().await && arrivals.next().await.is_none());
    }
}
