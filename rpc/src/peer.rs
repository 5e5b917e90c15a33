//! A process of the job, as others call it.

use std::sync::Arc;
use std::time::Duration;

use super::endpoint::Destination;
use super::target::Target;
use super::{Endpoint, FromValues, IntoValues, Pending, RRef, RemoteError};

/// Another process, or this one. Cheap to clone; nothing is sent until a call is made.
#[derive(Clone, Debug)]
pub struct Peer {
    endpoint: Endpoint,
    to: Destination,
}

impl Peer {
    pub(crate) fn new(endpoint: Endpoint, name: Arc<str>, timeout: Duration) -> Self {
        Self { endpoint, to: Destination { peer: name, session: None, what: "".into(), timeout } }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.to.peer
    }

    /// The same process, with another time limit for each call.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.to.timeout = timeout;
        self
    }

    /// Makes an object, a module, or the result of a function over there, and refers to it.
    ///
    /// # Errors
    /// What went wrong with the call, also inside the constructor.
    pub fn remote(&self, name: &str, arguments: impl IntoValues) -> Result<RRef, RemoteError> {
        self.construct(name, false, arguments)
    }

    /// The one object of this name over there: the first call makes it with its arguments, later
    /// calls find it. It lives as long as the process.
    ///
    /// # Errors
    /// What went wrong with the call, also inside the constructor.
    pub fn singleton(&self, name: &str, arguments: impl IntoValues) -> Result<RRef, RemoteError> {
        self.construct(name, true, arguments)
    }

    fn construct(&self, name: &str, singleton: bool, arguments: impl IntoValues) -> Result<RRef, RemoteError> {
        let target = Target::Construct { name: name.to_owned(), singleton };
        let sent = self.endpoint.send_call(&self.to, target, None, arguments.into_values())?;
        Ok(Pending::<RRef>::new(sent).wait()?.timeout(self.to.timeout))
    }

    /// Calls a function over there and waits for its result.
    ///
    /// # Errors
    /// What went wrong with the call, also inside the function.
    pub fn rpc_sync<R: FromValues>(&self, function: &str, arguments: impl IntoValues) -> Result<R, RemoteError> {
        self.rpc_async(function, arguments)?.wait()
    }

    /// Calls a function over there.
    ///
    /// # Errors
    /// If the call cannot be sent.
    pub fn rpc_async<R: FromValues>(
        &self,
        function: &str,
        arguments: impl IntoValues,
    ) -> Result<Pending<R>, RemoteError> {
        let target = Target::Function { name: function.to_owned() };
        Ok(Pending::new(self.endpoint.send_call(&self.to, target, None, arguments.into_values())?))
    }
}
