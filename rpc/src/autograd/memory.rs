//! Gives access to a tensor's elements as a slice, so that the parameter server's optimizers work on them in place.

// Slices of memory that libtorch owns; each says why it is sound.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

use tch::{Device, Kind, Tensor};

use crate::error::RemoteError;

/// Elements that are copied and then changed at a time: few enough to stay in a core's own cache in between.
const PART: usize = 4096;

/// Returns a copy of `tensor` whose elements `change` has written. It is called with one range of places after the other
/// and the elements there. The tensor is on the CPU, and no other copy is made.
pub fn changed(tensor: &Tensor, mut change: impl FnMut(Range<usize>, &mut [f32])) -> Result<Tensor, RemoteError> {
    let old = tensor.detach().f_contiguous()?;
    check(&old)?;
    let (new, length) = (Tensor::f_empty(old.size(), (Kind::Float, Device::Cpu))?, old.numel());
    if length > 0 {
        // SAFETY: `check` says that so many f32 lie there, in this process's memory, and versions of parameters are not
        // written. The new tensor was made here with as many, so no other one shares them. Both outlive the slices.
        let (old, new): (&[f32], &mut [MaybeUninit<f32>]) = unsafe {
            (
                slice::from_raw_parts(old.data_ptr().cast(), length),
                slice::from_raw_parts_mut(new.data_ptr().cast(), length),
            )
        };
        for (index, (old, new)) in old.chunks(PART).zip(new.chunks_mut(PART)).enumerate() {
            let start = index * PART;
            change(start..start + old.len(), new.write_copy_of_slice(old));
        }
    }
    Ok(new)
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
            "an optimizer's loops are over dense Float tensors on the CPU, not {kind:?} on {device:?}"
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
        let new = changed(&tensor, |_, elements| elements[1] = 5.0).expect("f32");
        assert_eq!((tensor.double_value(&[1]), new.double_value(&[1])), (2.0, 5.0));
        assert_eq!(element_bytes(&new).expect("f32")[2], 3.0_f32.to_le_bytes());
        assert!(changed(&Tensor::zeros([0], tch::kind::FLOAT_CPU), |_, _| ()).expect("f32").numel() == 0);
        let turned = Tensor::zeros([2, 3], tch::kind::FLOAT_CPU).transpose(0, 1);
        assert_eq!(changed(&turned, |_, elements| elements[1] = 1.0).expect("f32").double_value(&[0, 1]), 1.0);
    }

    #[test]
    fn all_elements_are_copied_and_changed_once() {
        let length = 2 * PART + 13;
        let values: Vec<f32> = (0..length).map(|place| place as f32).collect();
        let mut places = Vec::new();
        let new = changed(&Tensor::from_slice(&values), |range, elements| {
            assert_eq!(elements, &values[range.clone()]);
            elements.iter_mut().for_each(|element| *element += 0.5);
            places.extend(range);
        });
        assert!(places.into_iter().eq(0..length));
        let want: Vec<f32> = values.iter().map(|value| value + 0.5).collect();
        assert_eq!(Vec::<f32>::try_from(new.expect("f32")).expect("f32"), want);
    }

    #[test]
    fn other_tensors_are_refused() {
        let whole = Tensor::zeros([2], tch::kind::INT64_CPU);
        assert!(changed(&whole, |_, _| ()).expect_err("i64").to_string().contains("not Int64"));
        let turned = Tensor::zeros([2, 3], tch::kind::FLOAT_CPU).transpose(0, 1);
        assert!(element_bytes(&turned).is_err());
    }
}
