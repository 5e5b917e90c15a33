//! Dispatches the frames that arrive over a connection: replies to calls of this process, calls to objects that it
//! hosts, and notices that references and contexts are not needed any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::Streaming;

use super::autograd::ContextState;
use super::link::{Answer, Link};
use super::lock::lock;
use super::object::{Call, Job, run};
use super::object_table::Hosted;
use super::reply::Responder;
use super::target::Target;
use super::wire::{decode, proto};
use super::{Endpoint, RRef, RemoteError, Value, peers};

/// Takes what the peer said in its Hello about what it holds here.
pub(crate) fn reconcile(endpoint: &Endpoint, hello: &proto::Hello) {
    let shared = endpoint.shared();
    if hello.held_at == shared.session {
        let held: HashMap<_, _> = hello.held.iter().map(|held| (held.object, held.count)).collect();
        shared.host.reconcile(hello.session, &held);
        shared.contexts.reconcile(endpoint, hello.session, &hello.contexts);
    }
}

/// Reads a connection until it ends; true if the peer said goodbye.
pub(crate) async fn read(endpoint: &Endpoint, link: &Arc<Link>, mut frames: Streaming<proto::Frame>) -> bool {
    let (reason, ended) = loop {
        match frames.message().await {
            Ok(Some(proto::Frame { kind: Some(proto::frame::Kind::Goodbye(_)) })) => {
                break (format!("{} has ended", link.peer), true);
            }
            Ok(Some(frame)) => {
                lock(&endpoint.shared().peers).heard(link, Instant::now());
                if let Some(kind) = frame.kind {
                    take(endpoint, link, kind);
                }
            }
            Ok(None) => break ("it was closed".to_owned(), false),
            Err(status) => break (status.message().to_owned(), false),
        }
    };
    tracing::debug!(peer = %link.peer, reason, "connection ended");
    peers::detach(endpoint, link, &reason, ended);
    ended
}

fn take(endpoint: &Endpoint, link: &Arc<Link>, kind: proto::frame::Kind) {
    use proto::frame::Kind;
    let shared = endpoint.shared();
    match kind {
        Kind::Reply(reply) => {
            let answer = match reply.error {
                Some(error) => Err(RemoteError::new(error.message)),
                None => decode(endpoint, link, reply.values).map(|values| Answer { values, piece: reply.piece }),
            };
            link.answer(reply.id, answer);
        }
        Kind::Call(call) => take_call(endpoint, link, call),
        Kind::Retain(retain) => drop(shared.host.retain(retain.object, link.session)),
        Kind::Release(release) => shared.host.release(release.object, link.session),
        Kind::EndContext(end) => shared.contexts.end(endpoint, end.context, link.session),
        Kind::Heartbeat(_) | Kind::Goodbye(_) | Kind::Hello(_) => {}
    }
}

fn take_call(endpoint: &Endpoint, link: &Arc<Link>, message: proto::Call) {
    let responder = Responder::peer(endpoint.clone(), Arc::clone(link), message.id);
    let arguments = match decode(endpoint, link, message.arguments) {
        Ok(arguments) => arguments,
        Err(error) => return responder.answer(Err(error)),
    };
    let Some(target) = message.target else {
        return responder.answer(Err(RemoteError::new("a call of a kind that this version does not know")));
    };
    let deadline = Instant::now() + Duration::from_millis(message.timeout_ms.into());
    let context = Some(message.context).filter(|&id| id != 0);
    let context = context.map(|id| endpoint.shared().contexts.open(id, link.session));
    let call = Call { endpoint: endpoint.clone(), caller: Arc::clone(&link.peer), deadline, context };
    begin(call, target.into(), arguments, responder);
}

/// Hands a call to what it is for, without waiting for it.
pub(crate) fn begin(call: Call, target: Target, arguments: Vec<Value>, responder: Responder) {
    let shared = call.endpoint.shared();
    match target {
        Target::Method { object, name } => match shared.host.find(object) {
            Ok((_, Hosted::Object(queue))) => queue.push(Job { call, method: name, arguments, responder }),
            Ok((_, Hosted::Module(module))) => {
                on_pool(call, responder, move |call| module.call(call, object, &name, arguments));
            }
            Ok((what, Hosted::Value(values))) => responder.answer(if name == "to_here" {
                Ok(Answer { values: lock(&values).iter().map(Value::share).collect(), piece: 0 })
            } else {
                Err(RemoteError::new(format!("`{what}` gave a plain value, which has only `to_here`")))
            }),
            Err(error) => responder.answer(Err(error)),
        },
        Target::Function { name } => on_pool(call, responder, move |call| {
            let values = call.endpoint.shared().registry.call(call, &name, arguments)?;
            Ok(Answer { values, piece: 0 })
        }),
        Target::Construct { name, singleton } => on_pool(call, responder, move |call| {
            let reference = if singleton { only(call, &name, arguments) } else { make(call, &name, arguments) }?;
            Ok(Answer { values: vec![Value::Ref(reference)], piece: 0 })
        }),
        Target::Backward { piece } => on_pool(call, responder, move |call| {
            let context = call.context.as_ref().ok_or_else(|| RemoteError::new("backward needs a context"))?;
            let values = ContextState::backward(context, &call.endpoint, piece, arguments)?;
            Ok(Answer { values, piece: 0 })
        }),
    }
}

/// Runs a body that may block or compute on a thread where that is allowed.
fn on_pool(call: Call, responder: Responder, body: impl FnOnce(&Call) -> Result<Answer, RemoteError> + Send + 'static) {
    let runtime = call.endpoint.shared().runtime.clone();
    runtime.spawn_blocking(move || responder.answer(run(&call, || body(&call))));
}

fn make(call: &Call, name: &str, arguments: Vec<Value>) -> Result<RRef, RemoteError> {
    let hosted = call.endpoint.shared().registry.make(call, name, arguments)?;
    Ok(call.endpoint.adopt(name.into(), hosted))
}

/// The singleton: made by whoever locks its place first, while others wait.
fn only(call: &Call, name: &str, arguments: Vec<Value>) -> Result<RRef, RemoteError> {
    let shared = call.endpoint.shared();
    let place = shared.host.singleton(name);
    let mut place = lock(&place);
    if let Some(id) = *place {
        let what = shared.host.retain(id, shared.session)?;
        return Ok(RRef::new(call.endpoint.clone(), Arc::clone(&shared.name), shared.session, id, what));
    }
    let reference = make(call, name, arguments)?;
    shared.host.pin(reference.id());
    *place = Some(reference.id());
    Ok(reference)
}
