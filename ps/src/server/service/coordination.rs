//! The `Coordination` service: tracks members and reports progress.

use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tonic::{Request, Response, Status};

use super::{batch_assignment, caller};
use crate::batch::sharing::Work;
use crate::clock::now;
use crate::layout::{Layout, TensorSpec};
use crate::server::state::ServerState;
use crate::server::state::replication::Replication;
use crate::server::state::series::Series;
use crate::{proto, wire};

pub struct Coordination(pub Arc<ServerState>);

#[tonic::async_trait]
impl proto::coordination_server::Coordination for Coordination {
    async fn join(&self, request: Request<proto::JoinRequest>) -> Result<Response<proto::JoinReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        let tensors: Vec<TensorSpec> = request.tensors.into_iter().map(TensorSpec::from).collect();
        let config = &self.0.config;
        let elastic = config.min_trainers.is_some();
        if request.elastic != elastic {
            return Err(Status::invalid_argument(if elastic {
                "this job is elastic, the trainer is not; start it with --min-trainers, with a workload that can"
            } else {
                "the trainer was started for an elastic job, this server was not; give it --min-trainers, too"
            }));
        }
        if let Some(why) = config.refuses_parameters.filter(|_| !tensors.is_empty()) {
            return Err(Status::invalid_argument(why));
        }
        self.0.members().place(&id)?;
        // A trainer that has voted for the process before this one is free to vote again when it hears of this one.
        let epoch = self.0.epoch_when_whole().await.map_err(|status| self.0.with_holder(request.shard, status))?;
        if tensors.is_empty() {
            self.0.members().join(&id, tensors, request.total_steps, now())?;
            self.0.series.iter().for_each(|series| series.joined(id.index, id.incarnation));
            tracing::info!(trainer = id.index, incarnation = id.incarnation, "joined, without parameters of its own");
            let (server, servers) = (config.index, config.servers);
            return Ok(Response::new(proto::JoinReply { server, servers, ..Default::default() }));
        }
        let layout = Layout::new(&tensors, config.servers as usize)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let local_steps = config.training.local_steps();
        if request.local_steps != local_steps {
            let exchanges = |steps| match steps {
                0 => "in every step".to_owned(),
                _ => format!("after {steps} steps that it makes alone"),
            };
            let (one, others) = (exchanges(request.local_steps), exchanges(local_steps));
            return Err(Status::invalid_argument(format!(
                "trainer {} exchanges {one}, and a trainer of this job {others}; give servers and trainers the same \
                 spec.training.local, or --local-steps",
                id.index
            )));
        }
        for TensorSpec { name, group, .. } in &tensors {
            self.0.rules.optimizer.check(name, group).map_err(Status::invalid_argument)?;
        }
        self.0.members().join(&id, tensors.clone(), request.total_steps, now())?;
        self.0.series.iter().for_each(|series| series.joined(id.index, id.incarnation));
        let store = self.0.store_for(layout, &tensors);
        // Without a shard the trainer only joins, so this server need not be a primary.
        let shard = match request.shard {
            Some(shard) => {
                self.0.hear_of_leader(shard, request.leader_term, request.leader_epoch);
                self.0.shard(Some(shard))?
            }
            None => config.index,
        };
        if let Some(batch_assignments) = &self.0.batch_assignments {
            batch_assignments.welcome();
        }
        let (next_step, empty_blocks) = store.next_step(shard, id.index).await?;
        let leader_term = if request.shard.is_some() { self.0.leader_term(shard)? } else { 0 };
        tracing::info!(trainer = id.index, incarnation = id.incarnation, next_step, "joined");
        Ok(Response::new(proto::JoinReply {
            next_step,
            block_elements: store.layout().block_elements() as u64,
            server: config.index,
            servers: config.servers,
            empty_blocks,
            shared_memory_socket: self
                .0
                .shared_memory
                .as_ref()
                .map_or_else(String::new, |offer| offer.name().to_owned()),
            epoch,
            window: wire::window(store.shard(shard).count(), config.trainers) as u32,
            leader_term,
            trainer_momentum: self.0.rules.trainer_momentum,
        }))
    }

    async fn leave(&self, request: Request<proto::LeaveRequest>) -> Result<Response<proto::LeaveReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.clone())?;
        self.0.members().leave(&request, &id, now())?;
        tracing::info!(trainer = id.index, incarnation = id.incarnation, finished = request.finished, "left");
        if !request.failure.is_empty() {
            tracing::warn!(trainer = id.index, "it ended with an error: {}", request.failure);
        }
        if let Some(batch_assignments) = &self.0.batch_assignments {
            batch_assignments.hear(&id, request.entry, request.done);
        }
        if self.0.config.min_trainers.is_some() {
            self.0.part(id.index, &Status::aborted("this trainer has left")).await;
        } else if request.finished {
            self.0.finish(id.index).await;
        }
        self.0.left.notify_waiters();
        self.0.end_if_done(&mut self.0.members());
        Ok(Response::new(proto::LeaveReply {}))
    }

    async fn wait_until_durable(
        &self,
        request: Request<proto::WaitUntilDurableRequest>,
    ) -> Result<Response<proto::WaitUntilDurableReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        {
            let mut members = self.0.members();
            members.hear(&id, now())?;
            self.0.check_epoch(request.epoch)?;
            members.claim(id.index, request.steps, now());
            // Without checkpoints no server goes back.
            members.conclude(id.index, self.0.config.checkpoint.is_none());
        }
        if self.0.config.checkpoint.is_some() && self.0.config.index == 0 {
            self.0.recovery.wait_until_durable(request.epoch).await?;
        }
        Ok(Response::new(proto::WaitUntilDurableReply {}))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        let holders = self.0.replication.as_ref().map(Replication::holders).unwrap_or_default();
        let finished_trainers = {
            let (mut members, now) = (self.0.members(), now());
            if let Err(refusal) = members.report(&id, request.examples, request.metrics, now) {
                // A trainer that cannot join yet must know which processes hold blocks, because it votes on them.
                let reply = proto::HeartbeatReply { holders, ..proto::HeartbeatReply::default() };
                let refusal = Status::from(refusal);
                return Err(Status::with_details(refusal.code(), refusal.message(), reply.encode_to_vec().into()));
            }
            if request.step > 0 {
                members.gave(id.index, request.step - 1, now);
            }
            // An invalid number counts as no waiting time.
            members.waited(id.index, Duration::try_from_secs_f64(request.waiting_seconds).unwrap_or_default(), now);
            members.spent(id.index, request.spent);
            if self.0.is_alone_with_the_finished() { members.finished() } else { Vec::new() }
        };
        self.0.learn_finished(&request.finished_trainers).await;
        if let Some(batch_assignments) = &self.0.batch_assignments {
            batch_assignments.hear(&id, request.entry, request.done);
        }
        let taken = self.0.series.as_ref().map_or_else(Series::none, |series| {
            series.take((id.index, id.incarnation), request.points, request.points_held)
        });
        Ok(Response::new(proto::HeartbeatReply { holders, finished_trainers, ..taken }))
    }

    async fn vote(&self, request: Request<proto::VoteRequest>) -> Result<Response<proto::VoteReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.clone())?;
        self.0.members().hear(&id, now())?;
        let replication = (self.0.replication.as_ref())
            .ok_or_else(|| Status::failed_precondition("this server replicates nothing, so that none is elected"))?;
        replication.vote(&request, (id.index, id.incarnation))?;
        let elected = request.granted && replication.decided(request.shard, request.term).await;
        Ok(Response::new(proto::VoteReply { elected }))
    }

    async fn get_batch_share(
        &self,
        request: Request<proto::GetBatchShareRequest>,
    ) -> Result<Response<proto::GetBatchShareReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        self.0.members().hear(&id, now())?;
        let mut sharing = self.0.sharing()?;
        let base = self.0.config.training.batch.base;
        if request.base != base {
            return Err(Status::invalid_argument(format!(
                "trainer {} reads {} examples a step, the job's batch.base is {base}; leave --batch-size out, or \
                 give server 0 the same",
                id.index, request.base
            )));
        }
        // An invalid number counts as no work.
        let busy = Duration::try_from_secs_f64(request.busy_seconds).unwrap_or_default();
        let share = sharing.ask(id.index, id.incarnation, Work { examples: request.examples, busy }, request.step);
        Ok(Response::new(proto::GetBatchShareReply {
            until_step: share.until,
            offset: share.offset,
            examples: share.examples,
        }))
    }

    async fn assign_batches(
        &self,
        request: Request<proto::AssignBatchesRequest>,
    ) -> Result<Response<proto::AssignBatchesReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        batch_assignment::assign(&self.0, &id, &request).await.map(Response::new)
    }

    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::StatusReply>, Status> {
        Ok(Response::new(status(&self.0)))
    }
}

/// Returns all that this server knows of the job. Steps are those that trainers make, although servers know only of exchanges.
pub(in crate::server) fn status(state: &ServerState) -> proto::StatusReply {
    let mut status = state.members().status(now());
    status.staleness = state.metrics.staleness_counts();
    if let Ok(sharing) = state.sharing() {
        status.trainers.iter_mut().for_each(|trainer| trainer.batch = sharing.share(trainer.index));
    }
    if let Some(batch_assignments) = &state.batch_assignments {
        let assigner = batch_assignments.assigner();
        (status.step, status.total_steps) = (assigner.done(), assigner.total().unwrap_or(status.total_steps));
    }
    let steps = state.config.training.steps_per_exchange();
    (status.step, status.total_steps) = (status.step * steps, status.total_steps * steps);
    for trainer in &mut status.trainers {
        (trainer.step, trainer.total_steps) = (trainer.step * steps, trainer.total_steps * steps);
        trainer.steps_per_second *= steps as f64;
    }
    if let Some(replication) = &state.replication {
        status.warnings.extend(replication.warnings(state.store().is_ok() || !state.all_tables().is_empty()));
    }
    status.warnings.extend(state.recovery.trouble());
    status.warnings.extend(state.recovery.failed_write().map(|failed| failed.sentence()));
    status.checkpoint = state.recovery.newest().map(|newest| proto::CheckpointStatus {
        step: newest.id.step,
        path: newest.path.display().to_string(),
        unix_seconds: newest.unix_seconds,
    });
    status
}
