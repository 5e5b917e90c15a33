//! Registers functions and constructors, and calls them by name.

use std::sync::Arc;

use super::convert::{FromValues, IntoValues};
use super::hosted_value::HostedValue;
use super::object::{Methods, ObjectQueue, RemoteObject};
use super::state::{Call, Function, Hosted, Registry};
use super::value::Value;
use crate::error::{RemoteError, unknown};

impl Registry {
    /// Offers a function. Calls of it run side by side.
    pub fn function<A: FromValues, R: IntoValues>(
        &mut self,
        name: &str,
        function: impl Fn(&Call, A) -> Result<R, RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        let function: Function =
            Box::new(move |call, arguments| Ok(function(call, A::from_values(arguments)?)?.into_values()));
        self.functions.insert(name.to_owned(), function);
        self
    }

    /// Offers a type of objects. An object's calls run one after the other, on its own thread.
    pub fn object<A: FromValues, T: RemoteObject>(
        &mut self,
        name: &str,
        constructor: impl Fn(&Call, A) -> Result<T, RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        let mut methods = Methods::default();
        T::methods(&mut methods);
        let (methods, thread) = (Arc::new(methods), name.to_owned());
        self.constructor(name, move |call, arguments| {
            let object = constructor(call, A::from_values(arguments)?)?;
            Ok(Arc::new(ObjectQueue::start(&thread, object, Arc::clone(&methods))?))
        })
    }

    /// Offers a constructor.
    pub(crate) fn constructor(
        &mut self,
        name: &str,
        constructor: impl Fn(&Call, Vec<Value>) -> Result<Arc<dyn Hosted>, RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        self.constructors.insert(name.to_owned(), Box::new(constructor));
        self
    }

    pub(crate) fn call(&self, call: &Call, name: &str, arguments: Vec<Value>) -> Result<Vec<Value>, RemoteError> {
        match self.functions.get(name) {
            Some(function) => function(call, arguments),
            None => Err(unknown("function", name, self.functions.keys().map(String::as_str))),
        }
    }

    /// Calls the constructor `name`, or a function, whose result is kept as a value.
    pub(crate) fn make(&self, call: &Call, name: &str, arguments: Vec<Value>) -> Result<Arc<dyn Hosted>, RemoteError> {
        if let Some(constructor) = self.constructors.get(name) {
            return constructor(call, arguments);
        }
        if self.functions.contains_key(name) {
            return Ok(Arc::new(HostedValue::new(self.call(call, name, arguments)?)));
        }
        let known = self.constructors.keys().chain(self.functions.keys()).map(String::as_str);
        Err(unknown("constructor or function", name, known))
    }
}
