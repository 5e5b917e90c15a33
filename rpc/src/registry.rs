//! What a process offers to others, by name: functions, and constructors of objects and modules. It is
//! filled when the process starts and does not change.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::autograd::{HostedModule, Module, Parameters};
use super::error::unknown;
use super::object::{Call, Methods, ObjectQueue, RemoteObject};
use super::object_table::Hosted;
use super::{FromValues, IntoValues, RemoteError, Value};

type Function = Box<dyn Fn(&Call, Vec<Value>) -> Result<Vec<Value>, RemoteError> + Send + Sync>;
type Constructor = Box<dyn Fn(&Call, Vec<Value>) -> Result<Hosted, RemoteError> + Send + Sync>;

/// Functions and constructors by name.
#[derive(Default)]
pub struct Registry {
    functions: BTreeMap<String, Function>,
    constructors: BTreeMap<String, Constructor>,
}

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
            Ok(Hosted::Object(ObjectQueue::start(&thread, object, Arc::clone(&methods))?))
        })
    }

    /// Offers a type of modules. A module's calls run side by side.
    pub fn module<A: FromValues, M: Module>(
        &mut self,
        name: &str,
        constructor: impl Fn(&Call, A) -> Result<(M, Parameters), RemoteError> + Send + Sync + 'static,
    ) -> &mut Self {
        self.constructor(name, move |call, arguments| {
            let (module, parameters) = constructor(call, A::from_values(arguments)?)?;
            Ok(Hosted::Module(Arc::new(HostedModule::new(module, parameters))))
        })
    }

    fn constructor(
        &mut self,
        name: &str,
        constructor: impl Fn(&Call, Vec<Value>) -> Result<Hosted, RemoteError> + Send + Sync + 'static,
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

    /// Makes what `name` stands for; the result of a function is kept as a value.
    pub(crate) fn make(&self, call: &Call, name: &str, arguments: Vec<Value>) -> Result<Hosted, RemoteError> {
        if let Some(constructor) = self.constructors.get(name) {
            return constructor(call, arguments);
        }
        if self.functions.contains_key(name) {
            return Ok(Hosted::Value(Arc::new(self.call(call, name, arguments)?.into())));
        }
        let known = self.constructors.keys().chain(self.functions.keys()).map(String::as_str);
        Err(unknown("constructor or function", name, known))
    }
}
