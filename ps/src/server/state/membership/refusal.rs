//! Why a trainer may not take part.

use tonic::Status;

/// Why a trainer is not let in, or no longer. None of these passes by waiting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A process of another job, most likely an old one at a reused address.
    ///
    /// The text does not name the server's job: where there are no certificates, its uid distinguishes members from others.
    #[error(
        "this server belongs to another job than {found}, the trainer's; check the address and start both from one job"
    )]
    OtherJob {
        /// Uid that the trainer named.
        found: String,
    },
    /// A rank beyond the job's size.
    #[error("trainer {found} is beyond this job's {trainers} trainers; check rank and world size")]
    NoSuchTrainer {
        /// Index that the trainer named.
        found: u32,
        /// Number of trainers of the job.
        trainers: u32,
    },
    /// It comes to a job that is over: all steps are kept, or what the others have done in an elastic one.
    #[error("the trainers of this job have finished; nothing is left for trainer {trainer}")]
    Over {
        /// Index of the trainer.
        trainer: u32,
    },
    /// Its successor has joined.
    #[error("trainer {trainer} incarnation {found} was replaced by incarnation {current}; this process can end")]
    Replaced {
        /// Index of the trainer.
        trainer: u32,
        /// Incarnation that asks.
        found: u32,
        /// Incarnation that has joined.
        current: u32,
    },
    /// It must join before anything else.
    #[error("trainer {trainer} incarnation {incarnation} has not joined; call Join first")]
    NotJoined {
        /// Index of the trainer.
        trainer: u32,
        /// Incarnation that asks.
        incarnation: u32,
    },
    /// The trainers do not train the same model.
    #[error(
        "trainer {trainer} has another model than the job: {difference}; start all trainers with the same arguments"
    )]
    OtherModel {
        /// Index of the trainer.
        trainer: u32,
        /// The tensors that only one of the two has, with their shapes.
        difference: String,
    },
    /// The server could not evaluate what it trains.
    #[error(
        "trainer {trainer} has another model than the one that this server evaluates: {difference}; give `serve evaluate` \
         the model's arguments of `train`"
    )]
    NotEvaluated {
        /// Index of the trainer.
        trainer: u32,
        /// The tensors that only one of the two has, with their shapes.
        difference: String,
    },
}

/// The one table from refusals to gRPC status.
impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        match refusal {
            Refusal::NoSuchTrainer { .. } | Refusal::OtherModel { .. } | Refusal::NotEvaluated { .. } => {
                Self::invalid_argument(text)
            }
            // Asking again would change nothing, and nothing is wrong: the trainer can end.
            Refusal::Over { .. } => Self::out_of_range(text),
            // Another process is in the way, and may be gone when the trainer is started again.
            Refusal::OtherJob { .. } | Refusal::Replaced { .. } => Self::failed_precondition(text),
            // The server may have been restarted: the trainer joins again and goes on.
            Refusal::NotJoined { .. } => Self::aborted(text),
        }
    }
}
