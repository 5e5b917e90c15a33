//! Gives access to a tensor's elements as a slice, so that the parameter server's optimizers work on them in place.

// Slices of memory that libtorch owns; each says why it is sound.
#![allow(unsafe_code)]

use std::slice;

use tch::{Device, Kind, Tensor};

use crate::error::RemoteError;

/// Returns a copy of `tensor` whose elements `change` has written. On the CPU, where the optimizers work, it is
/// the one copy; on another device the elements travel to the CPU and back.
pub fn changed(tensor: &Tensor, change: impl FnOnce(&mut [f32])) -> Result<Tensor, RemoteError> {
    let copy = tensor.detach().f_to_device_(Device::Cpu, tensor.kind(), false, true)?.f_contiguous()?;
    check(&copy)?;
    if copy.numel() > 0 {
        // SAFETY: `check` says that so many f32 lie there, in this process's memory. The copy was made
        // here, so no other tensor shares them; it outlives the slice.
        change(unsafe { slice::from_raw_parts_mut(copy.data_ptr().cast(), copy.numel()) });
    }
    Ok(copy.f_to_device(tensor.device())?)
}

/// Returns the bytes of each element, little-endian as on the wire, of an f32 tensor that is contiguous on the CPU.
pub fn element_bytes(tensor: &Tensor) -> Result<&[[u8; 4]], RemoteError> {
    check(tensor)?;
    if tensor.numel() == 0 {
        return Ok(&[]);
    }
    // SAFETY: as above; any bytes are a valid `[u8; 4]`. Gradients are not written once a context has them.
    Ok(unsafe { slice::from_raw_parts(tensor.data_ptr().cast(), tensor.numel()) })
}

fn check(tensor: &Tensor) -> Result<(), RemoteError> {
    let (kind, device) = (tensor.f_kind()?, tensor.device());
    if kind != Kind::Float || device != Device::Cpu || tensor.is_sparse() || !tensor.is_contiguous() {
        return Err(RemoteError::new(format!(
            "optimizers work on dense Float tensors on the CPU, not {kind:?} on {device:?}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_made_to_a_copy() {
        let tensor = Tensor::from_slice(&[1.0_f32, 2.0, 3.0]).set_requires_grad(true);
        let new = changed(&tensor, |elements| elements[1] = 5.0).expect("f32");
        assert_eq!((tensor.double_value(&[1]), new.double_value(&[1])), (2.0, 5.0));
        assert_eq!(element_bytes(&new).expect("f32")[2], 3.0_f32.to_le_bytes());
        assert!(changed(&Tensor::zeros([0], tch::kind::FLOAT_CPU), |_| ()).expect("f32").numel() == 0);
        let turned = Tensor::zeros([2, 3], tch::kind::FLOAT_CPU).transpose(0, 1);
        assert_eq!(changed(&turned, |elements| elements[1] = 1.0).expect("f32").double_value(&[0, 1]), 1.0);
    }

    #[test]
    fn other_tensors_are_refused() {
        let whole = Tensor::zeros([2], tch::kind::INT64_CPU);
        assert!(changed(&whole, |_| ()).expect_err("i64").to_string().contains("not Int64"));
        let turned = Tensor::zeros([2, 3], tch::kind::FLOAT_CPU).transpose(0, 1);
        assert!(element_bytes(&turned).is_err());
    }
}
