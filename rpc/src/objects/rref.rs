//! Calls through references.

use super::convert::{FromValues, IntoValues};
use super::pending::Pending;
use super::value::RRef;
use crate::error::RemoteError;

impl RRef {
    /// Calls a method and waits for its result.
    ///
    /// # Errors
    /// If the call or the method failed.
    pub fn rpc_sync<R: FromValues>(&self, method: &str, arguments: impl IntoValues) -> Result<R, RemoteError> {
        self.rpc_async(method, arguments)?.wait()
    }

    /// Calls a method. Calls from one thread to one object run in the order they were made.
    ///
    /// # Errors
    /// If the call cannot be sent.
    pub fn rpc_async<R: FromValues>(
        &self,
        method: &str,
        arguments: impl IntoValues,
    ) -> Result<Pending<R>, RemoteError> {
        Ok(Pending::new(self.send(method, None, arguments.into_values())?))
    }

    /// Returns a copy of the value, if the reference is to a function's result.
    ///
    /// # Errors
    /// If the call failed, or this is an object: call its methods instead.
    pub fn to_here<R: FromValues>(&self) -> Result<R, RemoteError> {
        self.rpc_sync("to_here", ())
    }
}
