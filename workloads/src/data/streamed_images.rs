//! Images like those of MNIST from a URL: `train/` is read a piece at a time, `test/` whole. Each holds safetensors with `images`
//! and `labels`, CSV or Parquet with 784 pixels and the label, or a folder of images for each class.

use psjobs_worker::data::{DataError, DataSet, Dataset, Expected, Fields, Kind as Number, ReadError, Settings};
use tch::{Device, Tensor};

use super::mnist::{CLASSES, Examples, SIDE, Set};
use super::streamed::{below, classes, same_classes, stacked, tensors};

/// Steps whose examples are announced before they are read.
const AHEAD: u64 = 8;
/// Examples of the test set that are read at once.
const CHUNK: usize = 1024;

/// Images of which pieces are in memory.
#[derive(Clone, Debug)]
pub struct StreamedImages {
    data: DataSet,
    url: String,
    set: Set,
    device: Device,
}

/// The training set, from wherever it comes.
#[derive(Clone, Debug)]
pub enum Images {
    Whole(Examples),
    Streamed(StreamedImages),
}

impl StreamedImages {
    /// Looks at the training set below a URL, and reads the test set.
    ///
    /// # Errors
    /// If a file cannot be read, is damaged or of another schema, or if both sets have folders for classes, and not the same.
    pub fn open(url: &str, set: Set, settings: &Settings, device: Device) -> Result<(Self, Examples), ReadError> {
        let open = |name| Self::open_part(below(url, name), set, settings, device);
        let (train, test) = (open("train")?, open("test")?);
        same_classes(&train.data, &test.data)?;
        let numbers: Vec<i64> = (0..test.examples() as i64).collect();
        let read: Vec<(Tensor, Tensor)> = numbers.chunks(CHUNK).map(|part| test.raw(part)).collect::<Result<_, _>>()?;
        let (images, labels): (Vec<_>, Vec<_>) = read.into_iter().unzip();
        let cat = |parts: &[Tensor]| Tensor::cat(parts, 0).to(device);
        Ok((train, Examples::of(cat(&images), cat(&labels), set)))
    }

    fn open_part(url: String, set: Set, settings: &Settings, device: Device) -> Result<Self, DataError> {
        let column =
            |name: &str, kind, shape, fields| Expected { name: name.to_owned(), kind, shape: Some(shape), fields };
        let expected = [
            column("images", Number::U8, vec![1, SIDE, SIDE], Fields::AllButLast),
            column("labels", Number::I64, Vec::new(), Fields::Last),
        ];
        let data = DataSet::open(&url, &expected, settings)?;
        Ok(Self { data, url, set, device })
    }

    /// Images `[n, 1, 28, 28]`, u8, and labels `[n]`, i64, on the CPU.
    fn raw(&self, examples: &[i64]) -> Result<(Tensor, Tensor), ReadError> {
        let (images, labels) = if self.data.classes().is_some() {
            let files = self.data.read_files(examples)?;
            // The three colours of a grey image are alike.
            (stacked(&files)?.narrow(1, 0, 1), classes(&files))
        } else {
            let [images, labels] = tensors(&self.data.read(examples)?, self.data.columns());
            (images, labels)
        };
        let unfit = |problem: String| ReadError { text: format!("{}: {problem}", self.url), is_input: true };
        let side = SIDE as i64;
        if images.size()[1..] != [1, side, side] {
            let found = images.size();
            return Err(unfit(format!("its images are {}x{}, expected {SIDE}x{SIDE}", found[2], found[3])));
        }
        if examples.is_empty() {
            return Ok((images, labels));
        }
        let (least, most) = (labels.min().int64_value(&[]), labels.max().int64_value(&[]));
        if least < 0 || most >= CLASSES as i64 {
            return Err(unfit(format!("labels go from {least} to {most}, expected 0 to {}", CLASSES - 1)));
        }
        Ok((images, labels))
    }
}

impl Dataset for StreamedImages {
    /// Normalised images `[b, 1, 28, 28]` and labels `[b]`.
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        self.data.examples()
    }

    /// # Panics
    /// If an example cannot be read. The loader uses [`Dataset::read`].
    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        self.read(examples).unwrap_or_else(|error| panic!("{error}"))
    }

    fn read(&self, examples: &[i64]) -> Result<(Tensor, Tensor), ReadError> {
        let (images, labels) = self.raw(examples)?;
        Ok((self.set.normalise(&images.to(self.device)), labels.to(self.device)))
    }

    fn ahead(&self) -> u64 {
        AHEAD
    }

    fn will_read(&self, examples: &[i64]) {
        self.data.will_read(examples);
    }
}

impl Dataset for Images {
    /// Normalised images `[b, 1, 28, 28]` and labels `[b]`.
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        match self {
            Self::Whole(images) => images.examples(),
            Self::Streamed(images) => images.examples(),
        }
    }

    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        match self {
            Self::Whole(images) => images.batch(examples),
            Self::Streamed(images) => images.batch(examples),
        }
    }

    fn read(&self, examples: &[i64]) -> Result<(Tensor, Tensor), ReadError> {
        match self {
            Self::Whole(images) => images.read(examples),
            Self::Streamed(images) => images.read(examples),
        }
    }

    fn ahead(&self) -> u64 {
        match self {
            Self::Whole(images) => images.ahead(),
            Self::Streamed(images) => images.ahead(),
        }
    }

    fn will_read(&self, examples: &[i64]) {
        match self {
            Self::Whole(images) => images.will_read(examples),
            Self::Streamed(images) => images.will_read(examples),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use tch::Kind;
    use tch::vision::image;

    use super::*;

    fn open(root: &Path) -> Result<(StreamedImages, Examples), ReadError> {
        let settings = Settings { cache_dir: Some(root.join("cache")), ..Settings::default() };
        StreamedImages::open(&format!("file://{}", root.display()), Set::Mnist, &settings, Device::Cpu)
    }

    fn pixels(value: i64) -> Tensor {
        Tensor::full([SIDE as i64, SIDE as i64], value, (Kind::Uint8, Device::Cpu))
    }

    /// Three examples: black, white and grey, of the classes 3, 1 and 2.
    fn safetensors(root: &Path, labels: &[i64]) {
        for part in ["train", "test"] {
            fs::create_dir_all(root.join(part)).expect("creates");
            let images = Tensor::stack(&[pixels(0), pixels(255), pixels(100)], 0);
            let tensors = [("images", images), ("labels", Tensor::from_slice(labels))];
            Tensor::write_safetensors(&tensors, root.join(part).join("a.safetensors")).expect("written");
        }
    }

    #[test]
    fn images_of_safetensors_are_normalised_as_those_in_memory() {
        let root = tempfile::tempdir().expect("temporary folder");
        safetensors(root.path(), &[3, 1, 2]);
        let (train, test) = open(root.path()).expect("well formed");
        let ((images, labels), (want, classes)) = (train.read(&[1, 0]).expect("reads"), test.batch(&[1, 0]));
        assert_eq!(images.size(), [2, 1, 28, 28]);
        assert!(images.equal(&want) && labels.equal(&classes));
        assert!((images.double_value(&[0, 0, 13, 5]) - (1.0 - 0.1307) / 0.3081).abs() < 1e-6);
        assert_eq!(Vec::<i64>::try_from(labels).expect("1-d"), [1, 3]);
    }

    #[test]
    fn images_of_folders_are_those_of_their_classes() {
        let root = tempfile::tempdir().expect("temporary folder");
        for (part, class, value) in [("train", "0", 0), ("train", "1", 255), ("test", "0", 100), ("test", "1", 0)] {
            let folder = root.path().join(part).join(class);
            fs::create_dir_all(&folder).expect("creates");
            let colours = pixels(value).unsqueeze(0).repeat([3, 1, 1]);
            image::save(&colours, folder.join("a.png")).expect("written");
        }
        let (train, test) = open(root.path()).expect("well formed");
        let (images, labels) = train.read(&[1]).expect("reads");
        assert_eq!((images.size(), labels.int64_value(&[0])), (vec![1, 1, 28, 28], 1));
        assert!((images.double_value(&[0, 0, 0, 0]) - (1.0 - 0.1307) / 0.3081).abs() < 1e-6);
        assert_eq!(test.len(), 2);
        fs::remove_dir_all(root.path().join("test/0")).expect("removes");
        let error = open(root.path()).expect_err("1 would be the first class of the test set");
        assert!(error.is_input && error.text.contains("0 is in one of them alone"), "{error}");
    }

    #[test]
    fn labels_of_other_classes_are_refused() {
        let root = tempfile::tempdir().expect("temporary folder");
        safetensors(root.path(), &[3, 1, 10]);
        let error = open(root.path()).expect_err("there are ten classes");
        assert!(error.is_input && error.text.contains("labels go from 1 to 10, expected 0 to 9"), "{error}");
    }
}
