//! Safetensors: the header says where each tensor lies, and the rows of its first dimension are the examples.

use std::collections::BTreeMap;

use half::{bf16, f16};
use serde::Deserialize;

use crate::schema::{Column, Expected, Kind, Number};

/// A header of more bytes is none.
const LONGEST_HEADER: u64 = 100 << 20;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Its first byte in the file.
    pub begin: u64,
}

/// The types of tensors that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

#[derive(Debug, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Returns the bytes of a file that the header takes, of the first eight; `None` if there is no header.
#[must_use]
pub fn header_bytes(first: &[u8], file: u64) -> Option<u64> {
    let length = u64::from_le_bytes(first.try_into().ok()?);
    (length <= LONGEST_HEADER && length + 8 <= file).then_some(length)
}

/// Reads the header, which begins behind the first eight bytes.
///
/// # Errors
/// If it is damaged, or says more than the file has; the text says what is wrong.
pub fn tensors(header: &[u8], file: u64) -> Result<BTreeMap<String, Tensor>, String> {
    let entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|error| format!("its header is damaged ({error})"))?;
    let (data, mut tensors) = (8 + header.len() as u64, BTreeMap::new());
    for (name, entry) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
        let entry: Entry =
            serde_json::from_value(entry).map_err(|error| format!("tensor {name} is damaged ({error})"))?;
        let Some(dtype) = Dtype::named(&entry.dtype) else {
            // It may be one that nobody reads.
            continue;
        };
        let (begin, end) = entry.data_offsets;
        let elements = entry.shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
        let bytes = elements.and_then(|elements| elements.checked_mul(dtype.bytes() as u64));
        let taken = end.checked_sub(begin);
        if taken.is_none() || bytes != taken || end.checked_add(data).is_none_or(|end| end > file) {
            return Err(format!("tensor {name} of the shape {:?} does not fit its place in the file", entry.shape));
        }
        tensors.insert(name, Tensor { dtype, shape: entry.shape, begin: data + begin });
    }
    Ok(tensors)
}

/// Finds the tensor of an expected column, and the column as it is in the file.
///
/// # Errors
/// If there is none, or it is of another shape. The texts are what was expected and found.
pub fn column(tensors: &BTreeMap<String, Tensor>, expected: &Expected) -> Result<(Tensor, Column), (String, String)> {
    let Expected { name, kind, .. } = expected;
    let wanted = || match &expected.shape {
        Some(shape) => format!("a tensor {kind} of the shape [examples, {}]", joined(shape)),
        None => format!("a tensor {kind} with the examples as its first dimension"),
    };
    let Some(tensor) = tensors.get(name) else {
        let names = tensors.keys().cloned().collect::<Vec<_>>().join(", ");
        return Err((wanted(), format!("the tensors {names}")));
    };
    let inner: Option<Vec<usize>> =
        tensor.shape.get(1..).map(|inner| inner.iter().map(|size| *size as usize).collect());
    let fits = |inner: &[usize]| expected.shape.as_ref().is_none_or(|want| is_alike(want, inner));
    match inner {
        Some(inner) if fits(&inner) => {
            let shape = expected.shape.clone().unwrap_or(inner);
            Ok((tensor.clone(), Column { name: name.clone(), kind: *kind, shape }))
        }
        _ => Err((wanted(), format!("{:?} of the shape {:?}", tensor.dtype, tensor.shape))),
    }
}

/// Shapes are alike if they differ in dimensions of 1 alone.
fn is_alike(one: &[usize], other: &[usize]) -> bool {
    let long = |shape: &[usize]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
    long(one) == long(other)
}

fn joined(shape: &[usize]) -> String {
    shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl Dtype {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "BOOL" => Self::Bool,
            "U8" => Self::U8,
            "I8" => Self::I8,
            "I16" => Self::I16,
            "I32" => Self::I32,
            "I64" => Self::I64,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F32" => Self::F32,
            "F64" => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns true if the numbers are in the file as they are in memory.
    #[must_use]
    pub fn is(self, kind: Kind) -> bool {
        matches!((self, kind), (Self::U8, Kind::U8) | (Self::I64, Kind::I64) | (Self::F32, Kind::F32))
    }

    fn number(self, bytes: &[u8]) -> Option<Number> {
        Some(match self {
            Self::Bool | Self::U8 => Number::Int((*bytes.first()?).into()),
            Self::I8 => Number::Int(i8::from_le_bytes(bytes.try_into().ok()?).into()),
            Self::I16 => Number::Int(i16::from_le_bytes(bytes.try_into().ok()?).into()),
            Self::I32 => Number::Int(i32::from_le_bytes(bytes.try_into().ok()?).into()),
            Self::I64 => Number::Int(i64::from_le_bytes(bytes.try_into().ok()?)),
            Self::F16 => Number::Float(f16::from_le_bytes(bytes.try_into().ok()?).into()),
            Self::Bf16 => Number::Float(bf16::from_le_bytes(bytes.try_into().ok()?).into()),
            Self::F32 => Number::Float(f32::from_le_bytes(bytes.try_into().ok()?).into()),
            Self::F64 => Number::Float(f64::from_le_bytes(bytes.try_into().ok()?)),
        })
    }

    /// Writes numbers of this type as those of `kind`, as many as `into` has.
    ///
    /// # Errors
    /// If `kind` does not have one of the numbers; the text is that number.
    pub fn convert(self, bytes: &[u8], kind: Kind, into: &mut [u8]) -> Result<(), String> {
        if self.is(kind) {
            into.copy_from_slice(bytes);
            return Ok(());
        }
        for (from, into) in bytes.chunks_exact(self.bytes()).zip(into.chunks_exact_mut(kind.bytes())) {
            let number = self.number(from);
            number.and_then(|number| kind.put(number, into)).ok_or_else(|| match number {
                Some(Number::Int(value)) => value.to_string(),
                Some(Number::Float(value)) => format!("{value:?}"),
                None => "a number that is cut off".to_owned(),
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Fields;

    fn expected(name: &str, kind: Kind, shape: Option<&[usize]>) -> Expected {
        Expected { name: name.into(), kind, shape: shape.map(<[usize]>::to_vec), fields: Fields::Named }
    }

    #[test]
    fn a_header_says_where_tensors_lie() {
        let header = br#"{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},"y":{"dtype":"U8","shape":[3],"data_offsets":[24,27]}}"#;
        let bytes = header.len() as u64;
        assert_eq!(header_bytes(&bytes.to_le_bytes(), bytes + 8), Some(bytes));
        assert_eq!(header_bytes(&bytes.to_le_bytes(), bytes + 7), None);
        let found = tensors(header, bytes + 8 + 27).expect("well formed");
        assert_eq!(found["y"], Tensor { dtype: Dtype::U8, shape: vec![3], begin: bytes + 8 + 24 });
        assert!(tensors(header, bytes + 8 + 26).is_err_and(|why| why.contains("tensor y")));
        let (_, column) = super::column(&found, &expected("x", Kind::F32, None)).expect("it is there");
        assert_eq!(column.shape, [2]);
        for (expected, said) in [
            (expected("z", Kind::F32, None), "the tensors x, y"),
            (expected("x", Kind::F32, Some(&[3])), "F32 of the shape [3, 2]"),
        ] {
            let (_, error) = super::column(&found, &expected).expect_err(said);
            assert_eq!(error, said);
        }
        super::column(&found, &expected("x", Kind::F32, Some(&[1, 2]))).expect("a dimension of 1 makes no difference");
    }

    #[test]
    fn numbers_change_their_type_if_the_other_has_them() {
        let mut into = vec![0; 16];
        let halves = [3.0, -1.0].map(|value| f16::from_f32(value).to_le_bytes()).concat();
        Dtype::F16.convert(&halves, Kind::I64, &mut into).expect("whole");
        assert_eq!(into, [3_i64.to_le_bytes(), (-1_i64).to_le_bytes()].concat());
        let error = Dtype::F32.convert(&0.5_f32.to_le_bytes(), Kind::U8, &mut [0]).expect_err("not whole");
        assert_eq!(error, "0.5");
        let error = Dtype::F64.convert(&1e300_f64.to_le_bytes(), Kind::F32, &mut [0; 4]).expect_err("too large");
        assert_eq!(error, "1e300");
    }
}
