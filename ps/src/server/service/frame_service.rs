//! A gRPC service that reads and writes its messages without generated code ([`crate::wire`]), to avoid copies. Clients
//! see no difference.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use crate::server::state::ServerState;
use crate::unknown_peers::Peer;
use crate::wire::{Outgoing, Reader};

/// The methods of such a service.
pub trait Methods: Copy + Send + 'static {
    /// Its name, with its package.
    const NAME: &'static str;

    /// Begins the method of that name, which takes what comes in from `reader`; what it answers. `None` for a
    /// method that there is not.
    fn begin(self, method: &str, state: Arc<ServerState>, reader: Reader) -> Option<Result<Outgoing, Status>>;
}

/// The service, for tonic's router.
#[derive(Clone)]
pub struct FrameService<M> {
    methods: M,
    state: Arc<ServerState>,
}

impl<M: Methods> FrameService<M> {
    /// `methods` on the state of this server.
    #[must_use]
    pub fn new(methods: M, state: &Arc<ServerState>) -> Self {
        Self { methods, state: state.clone() }
    }
}

impl<M: Methods> NamedService for FrameService<M> {
    const NAME: &'static str = M::NAME;
}

impl<M: Methods> tower::Service<Request<Body>> for FrameService<M> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let peer = request.extensions().get::<Peer>().cloned();
        let reader = Reader::new(request.into_body(), self.state.rules.buffers.clone()).of(peer);
        let method = path.rsplit('/').next().unwrap_or_default();
        let begun = self.methods.begin(method, self.state.clone(), reader);
        let unknown =
            || Err(Status::unimplemented(format!("{path} is not known here; is the caller of this version?")));
        ready(Ok(begun.unwrap_or_else(unknown).map_or_else(Status::into_http, Outgoing::into_http)))
    }
}
