//! Inputs and targets of any shape in memory, from a CSV or safetensors file, or a folder: the data of workloads
//! that the user brings.

use std::path::Path;

use tch::{Device, Kind, Tensor};

pub use super::example_file::LabelledError;
use super::{example_file, folder};
use psjobs_worker::data::Dataset;

/// Examples on one device.
#[derive(Debug)]
pub struct Labelled {
    /// `[n, ...]`, f32.
    inputs: Tensor,
    /// `[n, ...]`, f32 or i64.
    targets: Tensor,
}

impl Labelled {
    /// Reads `path` to `device`. In a CSV the last column is the target. A safetensors file holds
    /// `inputs` and `targets`. A folder holds such files, or a folder for each class, in which every file is one
    /// example's input: an image, a CSV of numbers, or safetensors with `inputs`.
    ///
    /// # Errors
    /// If a file cannot be read, or its contents do not belong together.
    pub fn open(path: &Path, device: Device) -> Result<Self, LabelledError> {
        let (inputs, targets) = if path.is_dir() { folder::read(path)? } else { example_file::read(path)? };
        Ok(Self { inputs: inputs.to(device), targets: targets.to(device) })
    }

    /// Inputs in another shape, for example `[1, 28, 28]` each; `None` if their number does not fit.
    #[must_use]
    pub fn reshaped(self, shape: &[i64]) -> Option<Self> {
        let shape: Vec<i64> = std::iter::once(self.inputs.size()[0]).chain(shape.iter().copied()).collect();
        let fits = shape.iter().product::<i64>() == self.inputs.numel() as i64;
        fits.then(|| Self { inputs: self.inputs.reshape(shape), targets: self.targets })
    }

    /// Targets as class numbers; `None` if one is not a whole number of at least 0.
    #[must_use]
    pub fn classes(self) -> Option<Self> {
        let targets = self.targets.to_kind(Kind::Int64);
        let targets = if targets.dim() == 2 && targets.size()[1] == 1 { targets.squeeze_dim(1) } else { targets };
        let whole = targets.eq_tensor(&self.targets.view_as(&targets)).all().int64_value(&[]) == 1;
        (whole && targets.min().int64_value(&[]) >= 0).then_some(Self { inputs: self.inputs, targets })
    }

    /// Shape of one example's input.
    #[must_use]
    pub fn input_shape(&self) -> Vec<i64> {
        self.inputs.size()[1..].to_vec()
    }

    /// One more than the greatest target.
    #[must_use]
    pub fn class_count(&self) -> i64 {
        self.targets.max().int64_value(&[]) + 1
    }

    /// The first examples to train on and the last `held_out` to test on.
    ///
    /// # Panics
    /// If there are not more than `held_out`.
    #[must_use]
    pub fn split(self, held_out: usize) -> (Self, Self) {
        let (count, held_out) = (self.examples() as i64, held_out as i64);
        assert!(held_out < count, "{held_out} of {count} examples held out");
        let part = |start, length| Self {
            inputs: self.inputs.narrow(0, start, length),
            targets: self.targets.narrow(0, start, length),
        };
        (part(0, count - held_out), part(count - held_out, held_out))
    }
}

impl Clone for Labelled {
    /// Shares the memory.
    fn clone(&self) -> Self {
        Self { inputs: self.inputs.shallow_clone(), targets: self.targets.shallow_clone() }
    }
}

impl Dataset for Labelled {
    /// Inputs and targets.
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        self.inputs.size()[0] as usize
    }

    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        let examples = Tensor::from_slice(examples).to(self.inputs.device());
        (self.inputs.index_select(0, &examples), self.targets.index_select(0, &examples))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(name: &str, write: impl FnOnce(&Path)) -> Result<Labelled, LabelledError> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join(name);
        write(&file);
        Labelled::open(&file, Device::Cpu)
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor.flatten(0, -1)).expect("f32")
    }

    #[test]
    fn the_last_column_is_the_target() {
        let data = open("d.csv", |file| std::fs::write(file, "x,y,label\n1,2,0\n3,4,1\n5,6,1\n").expect("written"));
        let data = data.expect("well formed").classes().expect("whole numbers");
        let (train, test) = data.split(1);
        assert_eq!((train.examples(), test.examples()), (2, 1));
        let (inputs, targets) = train.batch(&[1, 0]);
        assert_eq!((inputs.size(), floats(&inputs)), (vec![2, 2], vec![3.0, 4.0, 1.0, 2.0]));
        assert_eq!(Vec::<i64>::try_from(targets).expect("1-d"), [1, 0]);
    }

    #[test]
    fn safetensors_keep_their_shapes() {
        let save = |file: &Path, names: [&str; 2], rows: i64| {
            let inputs = Tensor::arange(12, (Kind::Float, Device::Cpu)).reshape([3, 2, 2]);
            let targets = Tensor::zeros([rows, 1], (Kind::Float, Device::Cpu));
            Tensor::write_safetensors(&[(names[0], inputs), (names[1], targets)], file).expect("written");
        };
        let data = open("d.safetensors", |file| save(file, ["inputs", "targets"], 3)).expect("well formed");
        assert_eq!(data.batch(&[2]).0.size(), [1, 2, 2]);
        assert_eq!(data.clone().reshaped(&[4]).expect("fits").batch(&[2]).0.size(), [1, 4]);
        assert!(data.reshaped(&[3]).is_none(), "three do not fit four");
        for (names, rows, want) in
            [(["x", "y"], 3, "it holds x, y; save"), (["inputs", "targets"], 2, "[3, 2, 2] and targets [2, 1]")]
        {
            let error = open("d.safetensors", |file| save(file, names, rows)).expect_err(want).to_string();
            assert!(error.contains(want) && error.contains("d.safetensors"), "{error}");
        }
        let error = open("d.safetensors", |file| std::fs::write(file, "no").expect("written")).expect_err("damaged");
        assert!(error.to_string().contains("d.safetensors"), "{error}");
    }

    #[test]
    fn files_that_are_no_examples_are_refused() {
        for (name, contents, want) in [
            ("d.parquet", "", "a .safetensors or a folder"),
            ("d.csv", "1\n2\n", "one column"),
            ("d.csv", "1,a,3\n", "line 1"),
        ] {
            let error = open(name, |file| std::fs::write(file, contents).expect("written")).expect_err(want);
            assert!(error.to_string().contains(want), "{error}");
        }
        let data = open("d.csv", |file| std::fs::write(file, "1,0.5\n").expect("written")).expect("well formed");
        assert!(data.classes().is_none(), "0.5 is no class");
    }
}
