//! Dispatches the frames that arrive over a connection: replies to calls of this process, calls to objects that it
//! hosts, and notices that references and contexts are not needed any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::connection::{Connections, Link, Process};
use crate::error::RemoteError;
use crate::ids::{ContextId, ObjectId, Session};
use crate::objects::{Answer, Call, Endpoint, Job, RRef, Responder, Shared, Target, Value, decode, encode, on_pool};
use crate::proto;
use crate::proto::frame::Kind;
use crate::rendezvous;

impl Process for Shared {
    fn connections(&self) -> &Connections {
        &self.connections
    }

    fn reconcile(&self, holder: Session, held: &HashMap<ObjectId, u64>, contexts: &[ContextId]) {
        self.objects.reconcile(holder, held);
        self.contexts.reconcile(&self.connections, holder, contexts);
    }

    fn may_lack(&self, held: &HashMap<ObjectId, u64>, contexts: &[ContextId]) -> bool {
        !contexts.is_empty() || held.keys().any(|&object| !self.objects.is_pinned(object))
    }

    fn attached(self: Arc<Self>, peer: &Arc<str>) {
        rendezvous::publish_again(&Endpoint::of(self), peer);
    }

    fn receive(self: Arc<Self>, link: &Arc<Link>, frame: Kind) {
        match frame {
            Kind::Reply(reply) => {
                if let Err(unawaited) = link.answer(reply) {
                    // References in it were counted for this process, and must be released.
                    drop(decode(&Endpoint::of(self), link.session, unawaited.values));
                }
            }
            Kind::Call(call) => take_call(&Endpoint::of(self), link, call),
            Kind::Retain(retain) => link.count(|| drop(self.objects.retain(retain.object, link.session))),
            Kind::Release(release) => link.count(|| self.objects.release(release.object, link.session)),
            Kind::EndContext(end) => {
                link.count(|| self.contexts.end(&self.connections, end.context, link.session));
            }
            Kind::Heartbeat(_) | Kind::Goodbye(_) | Kind::Hello(_) => {}
        }
    }
}

fn take_call(endpoint: &Endpoint, link: &Arc<Link>, message: proto::Call) {
    let responder = responder(endpoint.clone(), Arc::clone(link), message.id);
    let arguments = match decode(endpoint, link.session, message.arguments) {
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

/// Returns what sends the answer to call `id` back over the connection. A call that failed while this process ends is
/// not answered: the goodbye that follows says that this process, and not the call, is the cause.
fn responder(endpoint: Endpoint, link: Arc<Link>, id: u64) -> Responder {
    Responder::new(move |answer| {
        if answer.is_err() && endpoint.connections().stopping.is_cancelled() {
            return;
        }
        let reply = answer.and_then(|answer| {
            let values = encode(&endpoint, link.session, &answer.values)?;
            Ok(proto::Reply { id, values, error: None, piece: answer.piece })
        });
        let reply = reply.unwrap_or_else(|error| proto::Reply {
            id,
            error: Some(proto::Error { message: error.to_string() }),
            ..proto::Reply::default()
        });
        link.send(Kind::Reply(reply));
    })
}

/// Hands a call to the object, function or context that it names, without waiting for it.
pub(crate) fn begin(call: Call, target: Target, arguments: Vec<Value>, responder: Responder) {
    match target {
        Target::Method { object, name: method } => match call.endpoint.shared().objects.find(object) {
            Ok((name, hosted)) => hosted.call(Job { call, object, name, method, arguments, responder }),
            Err(error) => responder.answer(Err(error)),
        },
        Target::Function { name } => on_pool(call, responder, move |call| {
            let values = call.endpoint.shared().registry.call(call, &name, arguments)?;
            Ok(Answer { values, piece: 0 })
        }),
        Target::Construct { name, singleton } => on_pool(call, responder, move |call| {
            let reference =
                if singleton { singleton_of(call, &name, arguments) } else { make(call, &name, arguments) }?;
            Ok(Answer { values: vec![Value::Ref(reference)], piece: 0 })
        }),
        Target::Backward { piece } => on_pool(call, responder, move |call| {
            let context = call.context.as_ref().ok_or_else(|| RemoteError::new("backward needs a context"))?;
            let values = context.backward(piece, arguments)?;
            Ok(Answer { values, piece: 0 })
        }),
    }
}

fn make(call: &Call, name: &str, arguments: Vec<Value>) -> Result<RRef, RemoteError> {
    let hosted = call.endpoint.shared().registry.make(call, name, arguments)?;
    Ok(call.endpoint.adopt(name.into(), hosted))
}

/// Returns the singleton; the first call makes it, while others wait.
fn singleton_of(call: &Call, name: &str, arguments: Vec<Value>) -> Result<RRef, RemoteError> {
    let shared = call.endpoint.shared();
    let place = shared.objects.singleton(name);
    let mut place = place.lock();
    if let Some(id) = *place {
        let session = shared.connections.session;
        let what = shared.objects.retain(id, session)?;
        return Ok(call.endpoint.reference((Arc::clone(&shared.connections.name), session), (id, what)));
    }
    let reference = make(call, name, arguments)?;
    shared.objects.pin(reference.id());
    *place = Some(reference.id());
    Ok(reference)
}
