//! The types of a data set: which columns a workload expects, how a row of them lies in memory, and the tables that are read.

use std::fmt;

/// The type of a column's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    U8,
    I64,
    F32,
}

/// Where the fields of a column are in a CSV or Parquet file, whose fields are single numbers. Columns of safetensors are
/// tensors, which have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fields {
    /// One field, which has the column's name.
    Named,
    /// All fields but the last one.
    AllButLast,
    /// The last field.
    Last,
}

/// A column that a workload expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The tensor's name in safetensors.
    pub name: String,
    pub kind: Kind,
    /// The shape of one example's value; `None` takes that of the data.
    pub shape: Option<Vec<usize>>,
    pub fields: Fields,
}

/// A column of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    pub kind: Kind,
    /// The shape of one example's value.
    pub shape: Vec<usize>,
}

/// The columns of a row, one behind the other, as a row lies in the cache: little-endian, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub columns: Vec<Column>,
    /// Where each column begins.
    pub offsets: Vec<usize>,
    /// Bytes of a row.
    pub row: usize,
}

/// The values of one column.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    U8(Vec<u8>),
    I64(Vec<i64>),
    F32(Vec<f32>),
}

/// Some examples: of each column the values of all, one behind the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    pub rows: usize,
    /// In the order of the columns that were expected.
    pub columns: Vec<Values>,
}

/// A number as a file has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Int(i64),
    Float(f64),
}

impl Kind {
    /// Bytes of a number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::I64 => 8,
            Self::F32 => 4,
        }
    }

    /// Writes a number in this type; `None` if the type does not have it.
    pub fn put(self, number: Number, into: &mut [u8]) -> Option<()> {
        match self {
            Self::F32 => {
                let value = match number {
                    Number::Int(value) => value as f32,
                    Number::Float(value) => value as f32,
                };
                // A float that is too large has become infinite.
                if !value.is_finite() {
                    return None;
                }
                into.copy_from_slice(&value.to_le_bytes());
            }
            Self::I64 => into.copy_from_slice(&number.whole()?.to_le_bytes()),
            Self::U8 => into.copy_from_slice(&[u8::try_from(number.whole()?).ok()?]),
        }
        Some(())
    }
}

impl Number {
    /// Returns the whole number that it is.
    fn whole(self) -> Option<i64> {
        /// Up to here every whole number is a float.
        const EXACT: f64 = 9_007_199_254_740_992.0;
        match self {
            Self::Int(value) => Some(value),
            Self::Float(value) => (value.fract() == 0.0 && value.abs() <= EXACT).then_some(value as i64),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8 (a whole number from 0 to 255)",
            Self::I64 => "i64 (a whole number)",
            Self::F32 => "f32 (a finite number)",
        })
    }
}

impl Column {
    /// Numbers in one example's value.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of one example's value.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.elements() * self.kind.bytes()
    }
}

impl Layout {
    #[must_use]
    pub fn new(columns: Vec<Column>) -> Self {
        let mut row = 0;
        let offsets = columns.iter().map(|column| {
            let begin = row;
            row += column.bytes();
            begin
        });
        let offsets = offsets.collect();
        Self { columns, offsets, row }
    }
}

impl Values {
    /// Makes room for `elements` numbers, all 0.
    #[must_use]
    pub fn zeros(kind: Kind, elements: usize) -> Self {
        match kind {
            Kind::U8 => Self::U8(vec![0; elements]),
            Kind::I64 => Self::I64(vec![0; elements]),
            Kind::F32 => Self::F32(vec![0.0; elements]),
        }
    }

    /// The numbers as bytes, in the order of this machine, which is little-endian.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::U8(values) => values.as_mut_slice(),
            Self::I64(values) => bytemuck::cast_slice_mut(values),
            Self::F32(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

impl Table {
    /// Makes room for so many rows.
    #[must_use]
    pub fn zeros(layout: &Layout, rows: usize) -> Self {
        let columns = layout.columns.iter().map(|column| Values::zeros(column.kind, rows * column.elements()));
        Self { rows, columns: columns.collect() }
    }

    /// Takes the row that lies in `record` as its row `at`.
    pub fn put(&mut self, layout: &Layout, at: usize, record: &[u8]) {
        for ((values, column), offset) in self.columns.iter_mut().zip(&layout.columns).zip(&layout.offsets) {
            let bytes = column.bytes();
            values.bytes_mut()[at * bytes..(at + 1) * bytes].copy_from_slice(&record[*offset..offset + bytes]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_becomes_one_of_a_type_that_has_it() {
        for (kind, number, want) in [
            (Kind::U8, Number::Int(255), Some(vec![255])),
            (Kind::U8, Number::Int(256), None),
            (Kind::U8, Number::Float(-1.0), None),
            (Kind::I64, Number::Float(-3.0), Some((-3_i64).to_le_bytes().to_vec())),
            (Kind::I64, Number::Float(0.5), None),
            (Kind::I64, Number::Float(f64::NAN), None),
            (Kind::I64, Number::Float(1e300), None),
            (Kind::F32, Number::Int(7), Some(7.0_f32.to_le_bytes().to_vec())),
            (Kind::F32, Number::Float(0.1), Some(0.1_f32.to_le_bytes().to_vec())),
            (Kind::F32, Number::Float(1e300), None),
            (Kind::F32, Number::Float(f64::NAN), None),
            (Kind::F32, Number::Float(f64::NEG_INFINITY), None),
        ] {
            let mut into = vec![0; kind.bytes()];
            let put = kind.put(number, &mut into);
            assert_eq!(put.map(|()| into), want, "{number:?} as {kind:?}");
        }
    }

    #[test]
    fn rows_are_taken_into_the_columns_of_a_table() {
        let column = |name: &str, kind, shape: &[usize]| Column { name: name.into(), kind, shape: shape.to_vec() };
        let layout = Layout::new(vec![column("x", Kind::F32, &[2]), column("y", Kind::I64, &[])]);
        assert_eq!((layout.row, &*layout.offsets), (16, &[0, 8][..]));
        let mut table = Table::zeros(&layout, 2);
        let record =
            [1.0_f32.to_le_bytes().to_vec(), 2.0_f32.to_le_bytes().to_vec(), 5_i64.to_le_bytes().to_vec()].concat();
        table.put(&layout, 1, &record);
        assert_eq!(table.columns, [Values::F32(vec![0.0, 0.0, 1.0, 2.0]), Values::I64(vec![0, 5])]);
    }
}
