//! The `Recovery` service: server 0 and the other servers bring each other to one state.

use std::sync::Arc;

use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

use crate::server::state::ServerState;
use crate::server::state::recovery::Newcomer;
use crate::server::task::recovery::server_checkpoint;
use crate::{proto, unknown_peers};

/// The service.
pub struct Service(pub Arc<ServerState>);

#[tonic::async_trait]
impl proto::recovery_server::Recovery for Service {
    async fn recover(&self, request: Request<proto::RecoverRequest>) -> Result<Response<proto::RecoverReply>, Status> {
        let request = self.with_checkpoints(request, |message| &message.job_uid)?;
        let (done, answer) = oneshot::channel();
        let proto::RecoverRequest { server, instance, given, epoch, .. } = request;
        let newcomer = Newcomer { server, instance, given, epoch, done };
        let leading = || Status::unavailable("this server does not lead yet");
        self.0.recovery.newcomers.send(newcomer).await.map_err(|_| leading())?;
        answer.await.map_err(|_| leading())?;
        Ok(Response::new(proto::RecoverReply {}))
    }

    async fn identify(
        &self,
        request: Request<proto::IdentifyRequest>,
    ) -> Result<Response<proto::IdentifyReply>, Status> {
        self.of_job(request, |message| &message.job_uid)?;
        let (server, incarnation) = (self.0.config.index, self.0.config.incarnation);
        Ok(Response::new(proto::IdentifyReply { server, incarnation }))
    }

    async fn get_epoch(
        &self,
        request: Request<proto::GetEpochRequest>,
    ) -> Result<Response<proto::GetEpochReply>, Status> {
        let request = self.with_checkpoints(request, |message| &message.job_uid)?;
        server_checkpoint::check_leader(&self.0, request.leader)?;
        self.0.recovery.last_written.send_replace(false);
        let recovery = &self.0.recovery;
        let whole_epoch = recovery.whole_epoch().unwrap_or(0);
        Ok(Response::new(proto::GetEpochReply { epoch: recovery.greatest_epoch(), whole_epoch }))
    }

    async fn restore(&self, request: Request<proto::RestoreRequest>) -> Result<Response<proto::RestoreReply>, Status> {
        let request = self.with_checkpoints(request, |message| &message.job_uid)?;
        Ok(Response::new(server_checkpoint::answer_restore(&self.0, request).await?))
    }

    async fn snapshot(
        &self,
        request: Request<proto::SnapshotRequest>,
    ) -> Result<Response<proto::SnapshotReply>, Status> {
        let request = self.with_checkpoints(request, |message| &message.job_uid)?;
        server_checkpoint::check_epoch(&self.0, request.epoch)?;
        server_checkpoint::check_leader(&self.0, request.leader)?;
        if request.last && request.done {
            self.0.recovery.ended.notify_one();
        }
        self.0.recovery.last_written.send_replace(request.last);
        if request.last {
            return Ok(Response::new(proto::SnapshotReply::default()));
        }
        let shard = self.0.shard(request.shard)?;
        let written = server_checkpoint::write(&self.0, shard, &request).await;
        let written = written.map_err(|error| match self.0.shard(Some(shard)) {
            Ok(_) => error.into(),
            Err(leads_no_more) => leads_no_more,
        })?;
        Ok(Response::new(proto::SnapshotReply {
            part: Some(written.part.into()),
            rows: written.rows.map(proto::CheckpointFile::from),
        }))
    }
}

impl Service {
    /// As [`Self::of_job`], for a request about checkpoints.
    fn with_checkpoints<M>(&self, request: Request<M>, uid: impl Fn(&M) -> &str) -> Result<M, Status> {
        let message = self.of_job(request, uid)?;
        if self.0.config.checkpoint.is_none() {
            return Err(Status::failed_precondition(
                "this server has no checkpoint folder, the caller has; start all servers with the same settings",
            ));
        }
        Ok(message)
    }

    /// Takes the message out of a request, if it comes from a server of this job, which is then known.
    fn of_job<M>(&self, request: Request<M>, uid: impl Fn(&M) -> &str) -> Result<M, Status> {
        let (want, (_, extensions, message)) = (&self.0.config.job_uid, request.into_parts());
        let uid = uid(&message);
        if uid != want {
            let text = format!("this server belongs to another job than {uid}, the caller's; check the addresses");
            return Err(Status::invalid_argument(text));
        }
        unknown_peers::set_known(&extensions);
        Ok(message)
    }
}
