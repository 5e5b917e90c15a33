//! The `SparseTables` service: forwards requests of trainers to [`crate::sparse`].

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::caller;
use crate::clock::now;
use crate::proto::sparse_tables_server::{self, SparseTablesServer};
use crate::proto::{
    BlockContents, GetLayersRequest, OpenTablesReply, OpenTablesRequest, PullRowsReply, PullRowsRequest, PushRowsReply,
    PushRowsRequest, StoreLayersReply, StoreLayersRequest,
};
use crate::server::state::ServerState;
use crate::sparse::{MAX_MESSAGE, Pull, Push, TableSpec, Tables, TablesError};

pub struct Service(Arc<ServerState>);

/// The service, for tonic's router.
pub fn service(state: Arc<ServerState>) -> SparseTablesServer<Service> {
    SparseTablesServer::new(Service(state)).max_decoding_message_size(MAX_MESSAGE)
}

#[tonic::async_trait]
impl sparse_tables_server::SparseTables for Service {
    async fn open_tables(&self, request: Request<OpenTablesRequest>) -> Result<Response<OpenTablesReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        self.0.members().hear(&id, now())?;
        let epoch = self.0.epoch()?;
        let specs: Vec<TableSpec> = request.tables.into_iter().map(TableSpec::from).collect();
        let shard = request.shard.unwrap_or(self.0.config.index);
        self.0.hear_of_leader(shard, request.leader_term, request.leader_epoch);
        self.0.shard(Some(shard))?;
        let tables = self.tables_for(shard, specs, id.index)?;
        self.0.set_servers_train_layers(request.servers_train_layers);
        let finished = self.0.members().finished();
        for trainer in finished {
            tables.finish(trainer).await;
        }
        let next_step = tables.next_step(id.index).await?;
        let (server, servers) = (self.0.config.index, self.0.config.servers);
        let leader_term = self.0.leader_term(shard)?;
        Ok(Response::new(OpenTablesReply { next_step, server, servers, epoch, leader_term }))
    }

    async fn pull_rows(&self, request: Request<PullRowsRequest>) -> Result<Response<PullRowsReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        let PullRowsRequest { wanted, epoch, shard, .. } = request;
        self.0.members().hear(&id, now())?;
        self.0.check_epoch(epoch)?;
        let wanted: Vec<Pull> =
            wanted.into_iter().map(|wanted| Pull { table: wanted.table, keys: wanted.keys }).collect();
        let (shard, tables) = self.tables(shard)?;
        let rows = tables.pull(id.index, &wanted).await?;
        // The servers may have gone to a checkpoint while it waited.
        self.0.check_epoch(epoch)?;
        let leader_term = self.0.leader_term(shard)?;
        Ok(Response::new(PullRowsReply { rows: rows.into_iter().map(Into::into).collect(), leader_term }))
    }

    async fn push_rows(&self, request: Request<PushRowsRequest>) -> Result<Response<PushRowsReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        let PushRowsRequest { step, tables: gradients, epoch, shard, .. } = request;
        self.0.check_epoch(epoch)?;
        let (shard, tables) = self.tables(shard)?;
        {
            let (mut members, now) = (self.0.members(), now());
            members.hear(&id, now)?;
            members.gave(id.index, step, now);
        }
        let pushes = gradients.into_iter().map(|t| Push { table: t.table, keys: t.keys, gradients: t.gradients });
        tables.push((id.index, epoch), step, &pushes.collect::<Vec<_>>()).await?;
        let leader_term = self.0.leader_term(shard)?;
        Ok(Response::new(PushRowsReply { layers_wanted_at: tables.layers_wanted(), leader_term }))
    }

    async fn store_layers(&self, request: Request<StoreLayersRequest>) -> Result<Response<StoreLayersReply>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        let StoreLayersRequest { epoch, contents, .. } = request;
        self.0.members().hear(&id, now())?;
        self.0.check_epoch(epoch)?;
        let contents = contents.ok_or_else(|| Status::invalid_argument("the message has no contents; set them"))?;
        let store = self.0.store()?;
        let shard = self.0.shard(Some(store.layout().owner(contents.block)))?;
        store.keep(epoch, contents).await?;
        Ok(Response::new(StoreLayersReply { leader_term: self.0.leader_term(shard)? }))
    }

    async fn get_layers(&self, request: Request<GetLayersRequest>) -> Result<Response<BlockContents>, Status> {
        let (request, id) = caller(&self.0, request, |message| message.trainer.take())?;
        let GetLayersRequest { block, epoch, .. } = request;
        self.0.members().hear(&id, now())?;
        self.0.check_epoch(epoch)?;
        let store = self.0.store()?;
        self.0.shard(Some(store.layout().owner(block)))?;
        let contents = store.contents(block).await?;
        self.0.check_epoch(epoch)?;
        Ok(Response::new(contents))
    }
}

impl Service {
    /// Returns a shard, by default this server's, and its tables; an error if another server is its primary.
    fn tables(&self, shard: Option<u32>) -> Result<(u32, Arc<Tables>), Status> {
        let missing = || Status::aborted("no trainer has described the tables yet; call OpenTables first");
        let shard = self.0.shard(shard)?;
        Ok((shard, self.0.tables(shard).ok_or_else(missing)?))
    }

    /// Returns the job's tables of `shard`; the first trainer's specs determine them.
    fn tables_for(&self, shard: u32, specs: Vec<TableSpec>, trainer: u32) -> Result<Arc<Tables>, Status> {
        TableSpec::validate(&specs).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (state, config) = (&self.0, &self.0.config);
        let table = &specs[0].name;
        if config.training.local.is_some() {
            return Err(Status::invalid_argument(format!(
                "rows of sparse tables are exchanged in every step, and spec.training.local is for trainers that make steps \
                 alone; this job has table {table}: remove spec.training.local"
            )));
        }
        if config.checkpoint.is_some() && state.store().is_err() {
            return Err(Status::invalid_argument(format!(
                "a checkpoint holds the rows of sparse tables together with the trainers' own layers; this job has table \
                 {table} and no layers: describe them in Join, or remove spec.checkpoint, or --checkpoint-dir"
            )));
        }
        let tables = state.tables_for(shard, &specs);
        match TableSpec::difference(tables.specs(), &specs) {
            Some(difference) => Err(Status::invalid_argument(format!(
                "trainer {trainer} has other tables than the job: {difference}; start all trainers with the same arguments"
            ))),
            None => Ok(tables),
        }
    }
}

impl From<TablesError> for Status {
    fn from(error: TablesError) -> Self {
        match error {
            TablesError::Ended => Self::unavailable(error.to_string()),
            _ => Self::invalid_argument(error.to_string()),
        }
    }
}
