//! A process of the job, as others call it.

use std::sync::Arc;
use std::time::Duration;

use super::convert::{FromValues, IntoValues};
use super::pending::Pending;
use super::state::Endpoint;
use super::target::Target;
use super::value::{Answer, Caller, Destination, RRef};
use crate::connection::Sent;
use crate::error::RemoteError;

/// Another process, or this one. Cheap to clone; nothing is sent until a call is made.
#[derive(Clone, Debug)]
pub struct Peer {
    endpoint: Endpoint,
    to: Destination,
}

impl Endpoint {
    /// Returns a handle to the process `name`, which may be this one.
    #[must_use]
    pub fn peer(&self, name: &str) -> Peer {
        let timeout = self.connections().settings.timeout;
        let to = Destination { peer: name.into(), session: None, what: "".into(), timeout, awaits_replacement: false };
        Peer { endpoint: self.clone(), to }
    }
}

impl Peer {
    #[must_use]
    pub fn name(&self) -> &str {
        &self.to.peer
    }

    /// Returns a handle to the same process with another time limit for each call.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.to.timeout = timeout;
        self
    }

    /// Returns a handle whose calls wait, until their deadline, for the process that takes the place of one that has
    /// ended or was silent for a whole lease. Without this they fail at once.
    #[must_use]
    pub fn await_replacement(mut self) -> Self {
        self.to.awaits_replacement = true;
        self
    }

    /// Makes an object, a module, or the result of a function over there, and refers to it.
    ///
    /// # Errors
    /// If the call or the constructor failed.
    pub fn remote(&self, name: &str, arguments: impl IntoValues) -> Result<RRef, RemoteError> {
        self.construct(name, false, arguments)
    }

    /// Returns the one object of this name over there: the first call makes it with its arguments, later
    /// calls find it. It lives as long as the process.
    ///
    /// # Errors
    /// If the call or the constructor failed.
    pub fn singleton(&self, name: &str, arguments: impl IntoValues) -> Result<RRef, RemoteError> {
        self.construct(name, true, arguments)
    }

    fn construct(&self, name: &str, singleton: bool, arguments: impl IntoValues) -> Result<RRef, RemoteError> {
        let target = Target::Construct { name: name.to_owned(), singleton };
        let sent = self.send(target, arguments)?;
        Ok(Pending::<RRef>::new(sent).wait()?.timeout(self.to.timeout))
    }

    fn send(&self, target: Target, arguments: impl IntoValues) -> Result<Sent<Answer>, RemoteError> {
        Arc::clone(self.endpoint.shared()).send_call(&self.to, target, None, arguments.into_values())
    }

    /// Calls a function over there and waits for its result.
    ///
    /// # Errors
    /// If the call or the function failed.
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
        Ok(Pending::new(self.send(target, arguments)?))
    }
}
