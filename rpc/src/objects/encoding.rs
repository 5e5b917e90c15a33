//! Converts values to messages and back, and counts the references among them.

use std::sync::Arc;

use super::state::Endpoint;
use super::tensor_message::{decode_tensor, encode_tensor};
use super::value::{RRef, Value};
use crate::error::RemoteError;
use crate::ids::Session;
use crate::proto;
use crate::proto::frame::Kind as Frame;
use crate::proto::value::Kind as Wire;

/// Converts values to messages for the process of `receiver`; references in them are counted for it.
pub(crate) fn encode(
    endpoint: &Endpoint,
    receiver: Session,
    values: &[Value],
) -> Result<Vec<proto::Value>, RemoteError> {
    values.iter().map(|value| encode_value(endpoint, receiver, value)).collect()
}

fn encode_value(endpoint: &Endpoint, receiver: Session, value: &Value) -> Result<proto::Value, RemoteError> {
    let kind = match value {
        Value::Null => Wire::Null(proto::Null {}),
        Value::Bool(v) => Wire::Boolean(*v),
        Value::Int(v) => Wire::Integer(*v),
        Value::Float(v) => Wire::Float(*v),
        Value::Text(v) => Wire::Text(v.clone()),
        Value::Data(v) => Wire::Data(v.clone()),
        Value::Tensor(v) => Wire::Tensor(encode_tensor(v)?),
        Value::Ref(v) => Wire::Reference(export(endpoint, receiver, v)),
        Value::List(v) => Wire::List(proto::List { values: encode(endpoint, receiver, v)? }),
    };
    Ok(proto::Value { kind: Some(kind) })
}

/// Converts messages from the process of `sender` to values; references in them are counted for this process.
pub(crate) fn decode(
    endpoint: &Endpoint,
    sender: Session,
    values: Vec<proto::Value>,
) -> Result<Vec<Value>, RemoteError> {
    values.into_iter().map(|value| decode_value(endpoint, sender, value)).collect()
}

fn decode_value(endpoint: &Endpoint, sender: Session, value: proto::Value) -> Result<Value, RemoteError> {
    Ok(match value.kind {
        None => return Err(RemoteError::new("a value of a kind that this version does not know")),
        Some(Wire::Null(_)) => Value::Null,
        Some(Wire::Boolean(v)) => Value::Bool(v),
        Some(Wire::Integer(v)) => Value::Int(v),
        Some(Wire::Float(v)) => Value::Float(v),
        Some(Wire::Text(v)) => Value::Text(v),
        Some(Wire::Data(v)) => Value::Data(v),
        Some(Wire::Tensor(v)) => Value::Tensor(decode_tensor(&v)?),
        Some(Wire::Reference(v)) => Value::Ref(import(endpoint, sender, &v)?),
        Some(Wire::List(v)) => Value::List(decode(endpoint, sender, v.values)?),
    })
}

/// Counts a reference that is sent to the process of `receiver`.
fn export(endpoint: &Endpoint, receiver: Session, reference: &RRef) -> proto::Reference {
    if reference.session() == endpoint.connections().session {
        // The sender's own reference keeps the object until this one is counted.
        drop(endpoint.shared().objects.retain(reference.id(), receiver));
    } else if reference.session() != receiver {
        park(endpoint, reference.clone());
    }
    proto::Reference {
        owner: reference.owner().to_owned(),
        session: reference.session(),
        object: reference.id(),
        name: reference.object_name().to_owned(),
    }
}

/// Keeps a third process's object alive until the receiver has counted its own reference.
fn park(endpoint: &Endpoint, reference: RRef) {
    let lease = endpoint.connections().settings.lease;
    endpoint.connections().spawn(async move {
        tokio::time::sleep(lease).await;
        drop(reference);
    });
}

/// Counts a reference that came from the process of `sender`.
fn import(endpoint: &Endpoint, sender: Session, reference: &proto::Reference) -> Result<RRef, RemoteError> {
    let connections = endpoint.connections();
    let (owner, name): (Arc<str>, Arc<str>) = (reference.owner.as_str().into(), reference.name.as_str().into());
    if reference.session == connections.session {
        endpoint.shared().objects.retain(reference.object, connections.session)?;
    } else {
        let mut remote_refs = connections.remote_refs.lock();
        remote_refs.add_reference(reference.session, reference.object);
        if reference.session != sender {
            let retain = proto::Retain { object: reference.object };
            connections.send_to(reference.session, Frame::Retain(retain));
        }
    }
    Ok(endpoint.reference((owner, reference.session), (reference.object, name)))
}
