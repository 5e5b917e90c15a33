//! Returns the answer of a call to its caller, exactly once.

use super::value::Answer;
use crate::error::RemoteError;

type OnAnswer = Box<dyn FnOnce(Result<Answer, RemoteError>) + Send>;

/// Owes one answer. Dropped without one, it answers that the call will not run.
pub(crate) struct Responder {
    on_answer: Option<OnAnswer>,
}

impl Responder {
    pub fn new(on_answer: impl FnOnce(Result<Answer, RemoteError>) + Send + 'static) -> Self {
        Self { on_answer: Some(Box::new(on_answer)) }
    }

    pub fn answer(mut self, answer: Result<Answer, RemoteError>) {
        if let Some(on_answer) = self.on_answer.take() {
            on_answer(answer);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(on_answer) = self.on_answer.take() {
            on_answer(Err(RemoteError::new("the object was freed, or its process ended, before the call began")));
        }
    }
}
