//! Converts between Rust types and the values that travel in calls.

use bytes::Bytes;
use tch::Tensor;

use super::value::{RRef, Value};
use crate::error::RemoteError;

/// A type that one [`Value`] can become.
pub trait FromValue: Sized {
    /// Names the type in errors.
    const EXPECTED: &'static str;

    /// # Errors
    /// The value as it came, if it is of another type.
    fn from_value(value: Value) -> Result<Self, Value>;
}

/// Arguments or results of a call: nothing, one value, or a tuple.
pub trait IntoValues {
    fn into_values(self) -> Vec<Value>;
}

/// The reverse of [`IntoValues`].
pub trait FromValues: Sized {
    /// # Errors
    /// A sentence with what was expected and what was found.
    fn from_values(values: Vec<Value>) -> Result<Self, RemoteError>;
}

fn convert<T: FromValue>(place: usize, value: Value) -> Result<T, RemoteError> {
    T::from_value(value).map_err(|value| {
        RemoteError::new(format!("value {place}: expected {}, found {}", T::EXPECTED, value.describe()))
    })
}

fn expect_count<const N: usize>(values: Vec<Value>) -> Result<[Value; N], RemoteError> {
    let found = values.len();
    values.try_into().map_err(|_| RemoteError::new(format!("expected {N} values, found {found}")))
}

macro_rules! single {
    ($($(#[$generic:ident])? $type:ty),+) => {$(
        impl$(<$generic: Into<Value>>)? IntoValues for $type {
            fn into_values(self) -> Vec<Value> {
                vec![self.into()]
            }
        }
    )+};
}

macro_rules! plain {
    ($($variant:ident($type:ty) = $expected:literal),+) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
        impl FromValue for $type {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: Value) -> Result<Self, Value> {
                match value {
                    Value::$variant(value) => Ok(value),
                    other => Err(other),
                }
            }
        }
        impl FromValues for $type {
            fn from_values(values: Vec<Value>) -> Result<Self, RemoteError> {
                let [value] = expect_count(values)?;
                convert(0, value)
            }
        }
    )+};
}

plain!(
    Bool(bool) = "a boolean",
    Int(i64) = "an integer",
    Float(f64) = "a float",
    Text(String) = "a text",
    Data(Bytes) = "bytes",
    Tensor(Tensor) = "a tensor",
    Ref(RRef) = "a reference"
);
single!(bool, i64, f64, String, &str, Bytes, Tensor, &Tensor, RRef, &RRef, #[T] Vec<T>, #[T] Option<T>);

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<&Tensor> for Value {
    fn from(value: &Tensor) -> Self {
        Self::Tensor(value.shallow_clone())
    }
}

impl From<&RRef> for Value {
    fn from(value: &RRef) -> Self {
        Self::Ref(value.clone())
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(values: Vec<T>) -> Self {
        Self::List(values.into_iter().map(Into::into).collect())
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl FromValue for Value {
    const EXPECTED: &'static str = "any value";
    fn from_value(value: Value) -> Result<Self, Value> {
        Ok(value)
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    const EXPECTED: &'static str = "a list of one type";
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::List(values) => values.into_iter().map(T::from_value).collect(),
            other => Err(other),
        }
    }
}

impl<T: FromValue> FromValue for Option<T> {
    const EXPECTED: &'static str = T::EXPECTED;
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Null => Ok(None),
            value => T::from_value(value).map(Some),
        }
    }
}

impl<T: FromValue> FromValues for Vec<T> {
    fn from_values(values: Vec<Value>) -> Result<Self, RemoteError> {
        let [value] = expect_count(values)?;
        convert(0, value)
    }
}

impl<T: FromValue> FromValues for Option<T> {
    fn from_values(values: Vec<Value>) -> Result<Self, RemoteError> {
        let [value] = expect_count(values)?;
        convert(0, value)
    }
}

/// Arguments or results whose number or types are known only at run time.
#[derive(Debug)]
pub struct Values(pub Vec<Value>);

impl IntoValues for Values {
    fn into_values(self) -> Vec<Value> {
        self.0
    }
}

impl FromValues for Values {
    fn from_values(values: Vec<Value>) -> Result<Self, RemoteError> {
        Ok(Self(values))
    }
}

impl IntoValues for () {
    fn into_values(self) -> Vec<Value> {
        Vec::new()
    }
}

impl FromValues for () {
    fn from_values(values: Vec<Value>) -> Result<Self, RemoteError> {
        expect_count::<0>(values).map(|_| ())
    }
}

macro_rules! tuple {
    ($($type:ident $place:tt),+) => {
        impl<$($type: Into<Value>),+> IntoValues for ($($type,)+) {
            fn into_values(self) -> Vec<Value> {
                vec![$(self.$place.into()),+]
            }
        }
        impl<$($type: FromValue),+> FromValues for ($($type,)+) {
            #[allow(non_snake_case)]
            fn from_values(values: Vec<Value>) -> Result<Self, RemoteError> {
                let [$($type),+] = expect_count(values)?;
                Ok(($(convert($place, $type)?,)+))
            }
        }
    };
}

tuple!(A 0);
tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);
tuple!(A 0, B 1, C 2, D 3, E 4);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_the_types_they_were() {
        let values = (3, true, "a", vec![0.5], None::<i64>).into_values();
        let back: (i64, bool, String, Vec<f64>, Option<i64>) = FromValues::from_values(values).expect("same types");
        assert_eq!(back, (3, true, "a".to_owned(), vec![0.5], None));
    }

    #[test]
    fn another_type_or_count_is_reported_with_both() {
        let tensor = Tensor::zeros([2, 3], tch::kind::FLOAT_CPU);
        let error = <(i64, i64)>::from_values((1, tensor).into_values()).expect_err("a tensor is no integer");
        assert_eq!(error.to_string(), "value 1: expected an integer, found a Float tensor of shape [2, 3]");
        let error = <(i64, i64)>::from_values(1_i64.into_values()).expect_err("one is missing");
        assert_eq!(error.to_string(), "expected 2 values, found 1");
    }
}
