//! A gRPC service whose messages are written and read by hand ([`crate::wire`]); to clients it looks like
//! generated code.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::shared::Shared;
use crate::wire::{Outgoing, Reader};

/// The methods of such a service.
pub trait Methods: Copy + Send + 'static {
    /// Its name, with its package.
    const NAME: &'static str;

    /// Begins the method of that name, which takes what comes in from `reader`; what it answers. `None` for a
    /// method that there is not.
    fn begin(self, method: &str, shared: Arc<Shared>, reader: Reader) -> Option<Result<Outgoing, Status>>;
}

/// The service, for tonic's router.
#[derive(Clone)]
pub struct Service<M> {
    methods: M,
    shared: Arc<Shared>,
}

impl<M: Methods> Service<M> {
    /// `methods` on the state of this server.
    #[must_use]
    pub fn new(methods: M, shared: &Arc<Shared>) -> Self {
        Self { methods, shared: shared.clone() }
    }
}

impl<M: Methods> NamedService for Service<M> {
    const NAME: &'static str = M::NAME;
}

impl<M: Methods> tower::Service<Request<Body>> for Service<M> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let reader = Reader::new(request.into_body(), self.shared.rules.buffers.clone());
        let method = path.rsplit('/').next().unwrap_or_default();
        let begun = self.methods.begin(method, self.shared.clone(), reader);
        let unknown =
            || Err(Status::unimplemented(format!("{path} is not known here; is the caller of this version?")));
        ready(Ok(begun.unwrap_or_else(unknown).map_or_else(Status::into_http, Outgoing::into_http)))
    }
}
