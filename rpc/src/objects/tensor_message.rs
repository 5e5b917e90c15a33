//! Converts tensors to messages and back. A tensor is copied once on either side, between its own storage and the
//! message; what a message claims is checked before it is used.

use bytes::Bytes;
use tch::{Kind, Tensor};

use crate::error::RemoteError;
use crate::proto;

const KINDS: [(proto::Kind, Kind); 10] = [
    (proto::Kind::Uint8, Kind::Uint8),
    (proto::Kind::Int8, Kind::Int8),
    (proto::Kind::Int16, Kind::Int16),
    (proto::Kind::Int32, Kind::Int),
    (proto::Kind::Int64, Kind::Int64),
    (proto::Kind::Float16, Kind::Half),
    (proto::Kind::Bfloat16, Kind::BFloat16),
    (proto::Kind::Float32, Kind::Float),
    (proto::Kind::Float64, Kind::Double),
    (proto::Kind::Bool, Kind::Bool),
];

pub(super) fn encode_tensor(tensor: &Tensor) -> Result<proto::Tensor, RemoteError> {
    let kind = tensor.f_kind()?;
    let Some((wire, _)) = KINDS.iter().find(|(_, k)| *k == kind) else {
        return Err(RemoteError::new(format!(
            "{kind:?} tensors cannot be sent; convert it first, for example to Float"
        )));
    };
    if tensor.is_sparse() {
        return Err(RemoteError::new(
            "sparse tensors cannot be sent; send its indices and values, or to_dense() of it",
        ));
    }
    let mut data = vec![0; tensor.numel() * kind.elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut data, tensor.numel())?;
    Ok(proto::Tensor {
        kind: (*wire).into(),
        shape: tensor.size().into_iter().map(i64::unsigned_abs).collect(),
        data: Bytes::from(data),
        requires_grad: tensor.requires_grad(),
    })
}

pub(super) fn decode_tensor(message: &proto::Tensor) -> Result<Tensor, RemoteError> {
    let Some((_, kind)) = KINDS.iter().find(|(wire, _)| i32::from(*wire) == message.kind) else {
        return Err(RemoteError::new(format!("tensor kind {} is unknown to this version", message.kind)));
    };
    let shape: Option<Vec<i64>> = message.shape.iter().map(|&n| i64::try_from(n).ok()).collect();
    let elements = message.shape.iter().try_fold(1_u64, |product, &n| product.checked_mul(n));
    let expected = elements.and_then(|n| n.checked_mul(kind.elt_size_in_bytes() as u64));
    let Some(shape) = shape.filter(|_| expected == Some(message.data.len() as u64)) else {
        let (shape, found) = (&message.shape, message.data.len());
        return Err(RemoteError::new(format!("a {kind:?} tensor of shape {shape:?} came with {found} bytes")));
    };
    let tensor = Tensor::f_from_data_size(&message.data, &shape, *kind)?;
    Ok(if message.requires_grad { tensor.f_set_requires_grad(true)? } else { tensor })
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn tensors_of_every_kind_survive_the_round_trip() {
        for (_, kind) in KINDS {
            let tensor = Tensor::arange(6, (Kind::Float, Device::Cpu)).to_kind(kind).view([2, 3]);
            let back = decode_tensor(&encode_tensor(&tensor).expect("encodes")).expect("decodes");
            assert_eq!((back.kind(), back.size()), (kind, vec![2, 3]));
            assert!(back.equal(&tensor), "{kind:?}");
        }
        for odd in [Tensor::zeros([0, 4], tch::kind::FLOAT_CPU), Tensor::from(2.5_f32)] {
            let back = decode_tensor(&encode_tensor(&odd).expect("encodes")).expect("decodes");
            assert!(back.equal(&odd) && back.size() == odd.size(), "{:?}", odd.size());
        }
    }

    #[test]
    fn a_view_travels_as_its_own_elements() {
        let tensor = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([2, 3]).transpose(0, 1);
        let message = encode_tensor(&tensor).expect("encodes");
        assert_eq!(message.data.len(), 48);
        assert!(decode_tensor(&message).expect("decodes").equal(&tensor));
    }

    #[test]
    fn a_message_that_cannot_be_a_tensor_is_refused() {
        let good = encode_tensor(&Tensor::zeros([2, 3], tch::kind::FLOAT_CPU)).expect("encodes");
        let rows = [
            (proto::Tensor { shape: vec![2, 4], ..good.clone() }, "shape [2, 4] came with 24 bytes"),
            (proto::Tensor { shape: vec![u64::MAX, u64::MAX], ..good.clone() }, "came with 24 bytes"),
            (proto::Tensor { shape: vec![u64::MAX, 0], data: Bytes::new(), ..good.clone() }, "came with 0 bytes"),
            (proto::Tensor { kind: 99, ..good.clone() }, "kind 99"),
        ];
        for (message, want) in rows {
            let error = decode_tensor(&message).expect_err(want).to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
