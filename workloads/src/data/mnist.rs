//! MNIST, Fashion-MNIST, or any set in their four files: images of 28x28 bytes and labels 0 to 9.

use std::env;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::idx::{Idx, IdxError};
use psjobs_worker::data::{DATA_VARIABLE, Dataset, NoPlace, locate};

/// Rows and columns of an image.
pub const SIDE: usize = 28;
pub const CLASSES: usize = 10;
/// Where Debian's package dataset-fashion-mnist puts its files.
const DEBIAN_FASHION: &str = "/usr/share/datasets/fashion-mnist";

/// Which data set it is: where it lies, and how its pixels are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Set {
    /// Handwritten digits
    #[default]
    Mnist,
    /// Fashion-MNIST, clothes
    Fashion,
}

impl Set {
    /// Its folder's name, and the target of make that fetches it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mnist => "mnist",
            Self::Fashion => "fashion",
        }
    }

    /// Mean and standard deviation of the training pixels on a scale from 0 to 1.
    fn moments(self) -> (f64, f64) {
        match self {
            Self::Mnist => (0.1307, 0.3081),
            Self::Fashion => (0.2860, 0.3530),
        }
    }

    /// `(pixel / 255 - mean) / deviation`, as one multiplication and one addition.
    pub(super) fn normalise(self, pixels: &Tensor) -> Tensor {
        let (mean, deviation) = self.moments();
        let mut scaled = pixels.to_kind(Kind::Float);
        let _ = scaled.g_mul_scalar_(1.0 / (255.0 * deviation));
        let _ = scaled.g_sub_scalar_(mean / deviation);
        scaled
    }

    /// The folder of the four files, see [`locate`].
    ///
    /// # Errors
    /// If nothing is given and there is no cache folder, or a URL is given.
    pub fn folder(self, given: Option<&Path>) -> Result<PathBuf, NoPlace> {
        let folder = locate(given, self.name())?;
        let debian = self == Self::Fashion && given.is_none() && !folder.exists() && Path::new(DEBIAN_FASHION).exists();
        Ok(if debian { DEBIAN_FASHION.into() } else { folder })
    }
}

/// Images and their labels on one device. Pixels stay bytes until they are read: a quarter of the
/// memory, and a batch is converted in no time.
#[derive(Debug)]
pub struct Examples {
    /// `[n, 1, 28, 28]`, u8.
    images: Tensor,
    /// `[n]`, i64.
    labels: Tensor,
    set: Set,
}

/// Training and test set.
#[derive(Debug)]
pub struct Mnist {
    pub train: Examples,
    pub test: Examples,
}

/// Why the data cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum MnistError {
    #[error(transparent)]
    NoFolder(#[from] NoPlace),
    #[error("{error}; run `make {}`, or name the folder that holds the four files with --data", set.name())]
    Missing { error: IdxError, set: Set },
    #[error("{error}; delete it and run `make {}`", set.name())]
    Damaged { error: IdxError, set: Set },
    #[error(transparent)]
    Unreadable(IdxError),
    #[error("{}: {problem}; delete it and run `make {}`", file.display(), set.name())]
    Unfit { file: PathBuf, problem: String, set: Set },
}

/// MNIST's folder: in `$PSJOB_DATA`, or where `make mnist` puts it.
///
/// # Errors
/// If neither the variable nor a home folder is set.
pub fn default_folder() -> Result<PathBuf, MnistError> {
    let given = env::var_os(DATA_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    Ok(Set::Mnist.folder(given.as_deref())?)
}

impl Mnist {
    /// Reads MNIST's four files in `folder` to `device`.
    ///
    /// # Errors
    /// If a file is missing or damaged, or images and labels do not belong together.
    pub fn open(folder: &Path, device: Device) -> Result<Self, MnistError> {
        Self::open_set(Set::Mnist, folder, device)
    }

    /// Reads the four files of a set like MNIST.
    ///
    /// # Errors
    /// If a file is missing or damaged, or images and labels do not belong together.
    pub fn open_set(set: Set, folder: &Path, device: Device) -> Result<Self, MnistError> {
        let open = |part| Examples::open(set, folder, part, device);
        Ok(Self { train: open("train")?, test: open("t10k")? })
    }
}

impl Examples {
    fn open(set: Set, folder: &Path, part: &str, device: Device) -> Result<Self, MnistError> {
        let image_file = folder.join(format!("{part}-images-idx3-ubyte"));
        let label_file = folder.join(format!("{part}-labels-idx1-ubyte"));
        let advise = |error| advise(error, set);
        let images = Idx::<3>::open(&image_file).map_err(advise)?;
        let labels = Idx::<1>::open(&label_file).map_err(advise)?;
        let unfit = |file: &Path, problem| Err(MnistError::Unfit { file: file.to_owned(), problem, set });

        let [count, rows, columns] = images.dims;
        if (rows, columns) != (SIDE, SIDE) {
            return unfit(&image_file, format!("its images are {rows}x{columns}, expected {SIDE}x{SIDE}"));
        }
        if count == 0 {
            return unfit(&image_file, "it holds no image".into());
        }
        if labels.dims != [count] {
            return unfit(&label_file, format!("it holds {} labels for {count} images", labels.dims[0]));
        }
        if let Some(place) = labels.data.iter().position(|&label| usize::from(label) >= CLASSES) {
            return unfit(&label_file, format!("label {place} is {}, expected 0 to 9", labels.data[place]));
        }
        let shape = [count as i64, 1, SIDE as i64, SIDE as i64];
        Ok(Self {
            images: Tensor::from_data_size(&images.data, &shape, Kind::Uint8).to(device),
            labels: Tensor::from_slice(&labels.data).to_kind(Kind::Int64).to(device),
            set,
        })
    }

    /// Images `[n, 1, 28, 28]`, u8, with their labels `[n]`, i64 from 0 to 9.
    pub(super) fn of(images: Tensor, labels: Tensor, set: Set) -> Self {
        Self { images, labels, set }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.numel()
    }

    /// Never true: a set without images is refused when it is read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Normalised images `[b, 1, 28, 28]` and labels `[b]` of the examples named.
    ///
    /// # Panics
    /// If an index is outside the set.
    pub fn select(&self, indices: &[i64]) -> (Tensor, Tensor) {
        let indices = Tensor::from_slice(indices).to(self.labels.device());
        (self.set.normalise(&self.images.index_select(0, &indices)), self.labels.index_select(0, &indices))
    }

    /// Where the images are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.images.device()
    }

    /// The whole set in order, in batches of at most `size`.
    pub fn batches(&self, size: usize) -> impl Iterator<Item = (Tensor, Tensor)> {
        (0..self.len()).step_by(size).map(move |start| {
            let length = size.min(self.len() - start) as i64;
            let images = self.images.narrow(0, start as i64, length);
            (self.set.normalise(&images), self.labels.narrow(0, start as i64, length))
        })
    }
}

impl Clone for Examples {
    /// Shares the memory.
    fn clone(&self) -> Self {
        Self { images: self.images.shallow_clone(), labels: self.labels.shallow_clone(), set: self.set }
    }
}

impl Dataset for Examples {
    /// Normalised images `[b, 1, 28, 28]` and labels `[b]`.
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        self.len()
    }

    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        self.select(examples)
    }
}

fn advise(error: IdxError, set: Set) -> MnistError {
    match error {
        IdxError::Missing(_) => MnistError::Missing { error, set },
        IdxError::Damaged { .. } => MnistError::Damaged { error, set },
        IdxError::Read { .. } => MnistError::Unreadable(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, dims: &[u32], data: &[u8]) {
        let mut file = vec![0, 0, 8, dims.len() as u8];
        dims.iter().for_each(|dim| file.extend(dim.to_be_bytes()));
        file.extend(data);
        std::fs::write(folder.join(name), file).expect("written");
    }

    /// Three examples: black, white and grey; labels 3, 1, 4.
    fn small() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("temporary folder");
        let pixels: Vec<u8> = [0, 255, 100].into_iter().flat_map(|value| [value; SIDE * SIDE]).collect();
        for set in ["train", "t10k"] {
            write(folder.path(), &format!("{set}-images-idx3-ubyte"), &[3, 28, 28], &pixels);
            write(folder.path(), &format!("{set}-labels-idx1-ubyte"), &[3], &[3, 1, 4]);
        }
        folder
    }

    #[test]
    fn examples_are_selected_and_normalised() {
        let mnist = Mnist::open(small().path(), Device::Cpu).expect("well formed");
        assert_eq!(mnist.train.len(), 3);
        let (images, labels) = mnist.train.select(&[1, 0]);
        assert_eq!(images.size(), [2, 1, 28, 28]);
        assert_eq!(Vec::<i64>::try_from(labels).expect("1-d"), [1, 3]);
        let pixel = |n: i64| images.double_value(&[n, 0, 13, 5]);
        assert!((pixel(0) - (1.0 - 0.1307) / 0.3081).abs() < 1e-6, "white is {}", pixel(0));
        assert!((pixel(1) + 0.1307 / 0.3081).abs() < 1e-6, "black is {}", pixel(1));
    }

    #[test]
    fn batches_cover_the_set_in_order() {
        let mnist = Mnist::open(small().path(), Device::Cpu).expect("well formed");
        let labels: Vec<Vec<i64>> =
            mnist.test.batches(2).map(|(_, labels)| Vec::try_from(labels).expect("1-d")).collect();
        assert_eq!(labels, [vec![3, 1], vec![4]]);
    }

    #[test]
    fn files_that_do_not_fit_are_refused_with_what_to_do() {
        type Spoil = fn(&Path);
        let rows: [(&str, Spoil, &[&str]); 6] = [
            (
                "missing",
                |f| std::fs::remove_file(f.join("t10k-labels-idx1-ubyte")).expect("removed"),
                &["t10k-labels-idx1-ubyte", "make mnist", "--data"],
            ),
            (
                "cut",
                |f| std::fs::write(f.join("train-images-idx3-ubyte"), [0, 0, 8]).expect("written"),
                &["train-images-idx3-ubyte", "ends too early", "delete it"],
            ),
            ("other size", |f| write(f, "train-images-idx3-ubyte", &[3, 8, 8], &[0; 192]), &["8x8", "28x28"]),
            ("none", |f| write(f, "train-images-idx3-ubyte", &[0, 28, 28], &[]), &["no image"]),
            ("fewer labels", |f| write(f, "train-labels-idx1-ubyte", &[2], &[0, 1]), &["2 labels for 3 images"]),
            ("no such digit", |f| write(f, "train-labels-idx1-ubyte", &[3], &[0, 10, 1]), &["label 1 is 10"]),
        ];
        for (label, spoil, wants) in rows {
            let folder = small();
            spoil(folder.path());
            let error = Mnist::open(folder.path(), Device::Cpu).expect_err(label).to_string();
            assert!(wants.iter().all(|want| error.contains(want)), "{label}: {error}");
        }
    }
}
