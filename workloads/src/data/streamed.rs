//! Examples of a URL as tensors, read a piece at a time: inputs and targets of a table, or images in a folder for each class.

use std::ops::Range;
use std::sync::Arc;

use psjobs_worker::data::{Column, DataError, DataSet, Dataset, ExampleFile, Expected, Fields, Kind as Number};
use psjobs_worker::data::{ReadError, Settings, Table, Values};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tch::vision::image;
use tch::{Device, Kind, Tensor};

/// Steps whose examples are announced before they are read.
const AHEAD: u64 = 8;

/// Inputs and targets of a data set, or of a run of its examples. Clones share what is cached.
#[derive(Clone, Debug)]
pub struct Streamed {
    data: DataSet,
    /// The examples of a folder for each class in another order, so that each run of them has all classes.
    order: Option<Arc<Vec<i64>>>,
    range: Range<usize>,
    /// Another shape of an example's input.
    shape: Option<Vec<i64>>,
    /// The number of classes, if it is known: the targets of a table are below it.
    classes: Option<i64>,
    device: Device,
}

impl Streamed {
    /// Looks at the data set of a URL. Its inputs are f32. Targets are whole numbers if they are `classes`, else f32.
    ///
    /// # Errors
    /// If a file cannot be read, is damaged or of another schema.
    pub fn open(url: &str, classes: bool, settings: &Settings, device: Device) -> Result<Self, DataError> {
        let column = |name: &str, kind, fields| Expected { name: name.to_owned(), kind, shape: None, fields };
        let targets = if classes { Number::I64 } else { Number::F32 };
        let expected = [column("inputs", Number::F32, Fields::AllButLast), column("targets", targets, Fields::Last)];
        let data = DataSet::open(url, &expected, settings)?;
        let order = data.classes().map(|_| {
            let mut order: Vec<i64> = (0..data.examples() as i64).collect();
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(0));
            Arc::new(order)
        });
        let range = 0..data.examples();
        Ok(Self { data, order, range, shape: None, classes: None, device })
    }

    /// Inputs in another shape, for example `[1, 28, 28]` each; `None` if their number does not fit.
    #[must_use]
    pub fn reshaped(self, shape: &[i64]) -> Option<Self> {
        let fits = match self.data.columns().first() {
            Some(inputs) => inputs.elements() as i64 == shape.iter().product::<i64>(),
            // The first image says it when it is read.
            None => true,
        };
        fits.then(|| Self { shape: Some(shape.to_vec()), ..self })
    }

    /// Refuses targets that are not below `classes`, which are found when they are read: a table is not read whole at the start.
    #[must_use]
    pub fn below(self, classes: i64) -> Self {
        Self { classes: Some(classes), ..self }
    }

    /// Checks that a test set has the same folders for classes as this training set, if both have some.
    ///
    /// # Errors
    /// If it has others: each data set numbers its own.
    pub fn same_classes(&self, test: &Self) -> Result<(), ReadError> {
        same_classes(&self.data, &test.data)
    }

    /// The first examples to train on and the last `held_out` to test on.
    ///
    /// # Panics
    /// If there are not more than `held_out`.
    #[must_use]
    pub fn split(self, held_out: usize) -> (Self, Self) {
        let count = self.examples();
        assert!(held_out < count, "{held_out} of {count} examples held out");
        let middle = self.range.end - held_out;
        let test = Self { range: middle..self.range.end, ..self.clone() };
        (Self { range: self.range.start..middle, ..self }, test)
    }

    /// One more than the greatest class of some examples, or the number of folders; a table is not read whole for it.
    ///
    /// # Errors
    /// If the examples cannot be read.
    pub fn class_count(&self) -> Result<i64, ReadError> {
        /// Examples that are looked at.
        const SAMPLE: usize = 1024;
        if let Some(classes) = self.data.classes() {
            return Ok(classes.len() as i64);
        }
        let sample: Vec<i64> = (0..self.examples().min(SAMPLE) as i64).collect();
        let (_, targets) = self.read(&sample)?;
        Ok(targets.max().int64_value(&[]) + 1)
    }

    /// The numbers of examples in the data set.
    fn numbers(&self, examples: &[i64]) -> Vec<i64> {
        let place = |example: &i64| *example + self.range.start as i64;
        let numbers = examples.iter().map(place);
        match &self.order {
            Some(order) => numbers.map(|place| order[place as usize]).collect(),
            None => numbers.collect(),
        }
    }
}

impl Dataset for Streamed {
    /// Inputs and targets.
    type Batch = (Tensor, Tensor);

    fn examples(&self) -> usize {
        self.range.len()
    }

    /// # Panics
    /// If an example cannot be read. The loader uses [`Dataset::read`]; this is for an evaluation, which has no other way out.
    fn batch(&self, examples: &[i64]) -> (Tensor, Tensor) {
        self.read(examples).unwrap_or_else(|error| panic!("{error}"))
    }

    fn read(&self, examples: &[i64]) -> Result<(Tensor, Tensor), ReadError> {
        let numbers = self.numbers(examples);
        let (inputs, targets) = match self.data.classes() {
            Some(_) => {
                let files = self.data.read_files(&numbers)?;
                let images = stacked(&files)?.to_kind(Kind::Float) / 255.0;
                (images, classes(&files))
            }
            None => {
                let table = self.data.read(&numbers)?;
                let [inputs, targets] = tensors(&table, self.data.columns());
                (inputs, class_numbers(targets, self.classes)?)
            }
        };
        let inputs = match &self.shape {
            Some(shape) => {
                let rows = [examples.len() as i64];
                let found = inputs.size();
                let reshaped = inputs.f_reshape([&rows[..], &shape[..]].concat());
                reshaped
                    .map_err(|_| unfit(format!("inputs {found:?} do not fit the shape {shape:?} of --input-shape")))?
            }
            None => inputs,
        };
        Ok((inputs.to(self.device), targets.to(self.device)))
    }

    fn ahead(&self) -> u64 {
        AHEAD
    }

    fn will_read(&self, examples: &[i64]) {
        self.data.will_read(&self.numbers(examples));
    }
}

fn unfit(text: String) -> ReadError {
    ReadError { text, is_input: true }
}

/// Refuses whole numbers that are no classes: those below 0, and those that are not below `classes`.
fn class_numbers(targets: Tensor, classes: Option<i64>) -> Result<Tensor, ReadError> {
    let whole = targets.kind() == Kind::Int64;
    if whole && targets.numel() > 0 && targets.min().int64_value(&[]) < 0 {
        return Err(unfit("a target is below 0; write classes as whole numbers from 0, or use --loss mse".to_owned()));
    }
    if let Some(classes) = classes.filter(|_| whole && targets.numel() > 0) {
        let (most, last) = (targets.max().int64_value(&[]), classes - 1);
        if most > last {
            return Err(unfit(format!(
                "a target is {most}, and the model tells the classes 0 to {last} apart; give it more outputs, or correct \
                 the target"
            )));
        }
    }
    // A column of its own is no class for each row.
    Ok(if whole && targets.dim() == 2 && targets.size()[1] == 1 { targets.squeeze_dim(1) } else { targets })
}

/// The columns of a table of two as tensors with the rows as their first dimension.
///
/// # Panics
/// If there are not two.
pub(super) fn tensors(table: &Table, columns: &[Column]) -> [Tensor; 2] {
    let tensor = |number: usize| {
        let inner = columns[number].shape.iter().map(|size| *size as i64);
        let shape: Vec<i64> = std::iter::once(table.rows as i64).chain(inner).collect();
        let flat = match &table.columns[number] {
            Values::U8(values) => Tensor::from_slice(values),
            Values::I64(values) => Tensor::from_slice(values),
            Values::F32(values) => Tensor::from_slice(values),
        };
        flat.reshape(shape)
    };
    [tensor(0), tensor(1)]
}

/// Decodes images, which must be of one size: `[n, 3, height, width]`, u8.
pub(super) fn stacked(files: &[ExampleFile]) -> Result<Tensor, DataError> {
    let mut images: Vec<Tensor> = Vec::with_capacity(files.len());
    for file in files {
        let decoded = image::load_from_memory(&file.bytes);
        let unfit = |problem: String| DataError::Unfit { file: file.name.clone(), problem };
        let decoded = decoded.map_err(|error| {
            let said = error.to_string().lines().next().unwrap_or_default().to_owned();
            unfit(format!("it is no image that can be read ({said}); write it anew, or remove it"))
        })?;
        if let Some(first) = images.first().filter(|first| first.size() != decoded.size()) {
            let (found, want) = (decoded.size(), first.size());
            let first = &files[0].name;
            return Err(unfit(format!("it has the shape {found:?}, {first} has {want:?}; bring all to one size")));
        }
        images.push(decoded);
    }
    Ok(Tensor::stack(&images, 0))
}

/// The classes of files as whole numbers.
pub(super) fn classes(files: &[ExampleFile]) -> Tensor {
    let classes: Vec<i64> = files.iter().map(|file| file.class.into()).collect();
    Tensor::from_slice(&classes)
}

/// Checks that two data sets have the same folders for classes, if both have some.
///
/// # Errors
/// If they have others; the text has both lists.
pub(super) fn same_classes(train: &DataSet, test: &DataSet) -> Result<(), ReadError> {
    match (train.classes(), test.classes()) {
        (Some(train), Some(test)) if train != test => Err(unfit(other_classes(train, test))),
        _ => Ok(()),
    }
}

/// Says how two lists of classes differ.
fn other_classes(train: &[String], test: &[String]) -> String {
    /// Classes of a list that are named.
    const NAMED: usize = 8;
    let listed = |names: &[String]| match names.len().saturating_sub(NAMED) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names[..NAMED].join(", ")),
    };
    let alone =
        train.iter().find(|name| !test.contains(name)).or_else(|| test.iter().find(|name| !train.contains(name)));
    format!(
        "the training set has a folder for each of the classes {}, the test set for {}, and {} is in one of them alone; \
         each numbers its own, so give both the same folders",
        listed(train),
        listed(test),
        alone.map_or("none", String::as_str),
    )
}

/// Returns the folder `name` below a URL.
pub(super) fn below(url: &str, name: &str) -> String {
    format!("{}/{name}", url.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::data::labelled::Labelled;

    fn settings(folder: &Path) -> Settings {
        Settings { cache_dir: Some(folder.join("cache")), cache: Some(1 << 20), ..Settings::default() }
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).expect("f32")
    }

    /// Opens a folder below a temporary one both ways.
    fn both(classes: bool, write: impl FnOnce(&Path)) -> (Streamed, Labelled, tempfile::TempDir) {
        let root = tempfile::tempdir().expect("temporary folder");
        let folder = root.path().join("data");
        fs::create_dir(&folder).expect("creates");
        write(&folder);
        let url = format!("file://{}", folder.display());
        let streamed = Streamed::open(&url, classes, &settings(root.path()), Device::Cpu).expect("well formed");
        let whole = Labelled::open(&folder, Device::Cpu).expect("well formed");
        (streamed, if classes { whole.classes().expect("whole numbers") } else { whole }, root)
    }

    fn same(streamed: &Streamed, whole: &Labelled) {
        assert_eq!(streamed.examples(), whole.examples());
        let all: Vec<i64> = (0..whole.examples() as i64).rev().collect();
        let ((inputs, targets), (want, classes)) = (streamed.read(&all).expect("reads"), whole.batch(&all));
        assert_eq!((inputs.size(), targets.size()), (want.size(), classes.size()));
        assert_eq!((inputs.kind(), targets.kind()), (want.kind(), classes.kind()));
        assert_eq!((values(&inputs), values(&targets)), (values(&want), values(&classes)));
    }

    #[test]
    fn a_url_gives_what_a_path_gives() {
        let csv = |folder: &Path| {
            let lines = (0..50).map(|row| format!("{row},{},{}\n", f64::from(row) / 3.0, row % 3));
            fs::write(folder.join("a.csv"), lines.collect::<String>()).expect("written");
            fs::write(folder.join("b.csv"), "1,2,0\n").expect("written");
        };
        for classes in [true, false] {
            let (streamed, whole, _root) = both(classes, csv);
            same(&streamed, &whole);
            let ((train, test), (want, held_out)) = (streamed.split(7), whole.split(7));
            same(&train, &want);
            same(&test, &held_out);
        }
        let (streamed, whole, _root) = both(true, |folder| {
            let inputs = Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape([4, 2, 3]);
            let targets = Tensor::from_slice(&[1_i64, 0, 2, 1]);
            let file = folder.join("a.safetensors");
            Tensor::write_safetensors(&[("inputs", inputs), ("targets", targets)], file).expect("written");
        });
        same(&streamed, &whole);
        assert_eq!(streamed.class_count().expect("reads"), 3);
        assert!(streamed.clone().reshaped(&[5]).is_none());
        assert_eq!(streamed.reshaped(&[6]).expect("fits").read(&[1]).expect("reads").0.size(), [1, 6]);
    }

    #[test]
    fn a_class_that_the_model_does_not_tell_apart_is_refused_when_it_is_read() {
        let (streamed, _, _root) = both(true, |folder| {
            fs::write(folder.join("a.csv"), "1,0\n2,1\n3,2\n").expect("written");
        });
        let _ = streamed.clone().below(3).read(&[0, 1, 2]).expect("there are three");
        let two = streamed.below(2);
        let _ = two.read(&[0, 1]).expect("below two");
        let error = two.read(&[1, 2]).expect_err("the third one");
        assert!(error.is_input && error.text.contains("a target is 2") && error.text.contains("0 to 1"), "{error}");
    }

    #[test]
    fn training_and_test_set_have_the_same_folders_for_classes() {
        let root = tempfile::tempdir().expect("temporary folder");
        let open = |set: &str, classes: &[&str]| {
            let folder = root.path().join(set);
            for class in classes {
                fs::create_dir_all(folder.join(class)).expect("creates");
                // It is not read.
                fs::write(folder.join(class).join("a.png"), "x").expect("written");
            }
            let url = format!("file://{}", folder.display());
            Streamed::open(&url, true, &settings(root.path()), Device::Cpu).expect("well formed")
        };
        let train = open("train", &["cat", "dog", "owl"]);
        train.same_classes(&open("same", &["owl", "dog", "cat"])).expect("the same ones");
        let error = train.same_classes(&open("fewer", &["cat", "owl"])).expect_err("owl is 2 and 1");
        for said in ["cat, dog, owl, the test set", "for cat, owl, and dog is in one"] {
            assert!(error.is_input && error.text.contains(said), "{said}: {error}");
        }
        let names = |count: usize| (0..count).map(|number| format!("c{number:03}")).collect::<Vec<_>>();
        let text = other_classes(&names(100), &names(101));
        assert!(text.contains("c007 and 92 more, the test set") && text.contains("c100 is in one"), "{text}");
    }

    #[test]
    fn images_of_a_url_come_in_the_order_of_a_path() {
        let (streamed, whole, _root) = both(true, |folder| {
            for number in 0..12_i64 {
                let class = folder.join(["cat", "dog", "owl"][number as usize % 3]);
                fs::create_dir_all(&class).expect("creates");
                let pixels = Tensor::full([3, 4, 5], number * 20, (Kind::Uint8, Device::Cpu));
                image::save(&pixels, class.join(format!("{number}.png"))).expect("written");
            }
        });
        same(&streamed, &whole);
        assert_eq!(streamed.class_count().expect("folders"), 3);
    }

    #[test]
    fn an_example_that_does_not_fit_is_named() {
        let root = tempfile::tempdir().expect("temporary folder");
        let url = format!("file://{}", root.path().join("data").display());
        let class = root.path().join("data/cat");
        fs::create_dir_all(&class).expect("creates");
        fs::write(class.join("a.png"), "no").expect("written");
        let streamed = Streamed::open(&url, true, &settings(root.path()), Device::Cpu).expect("it is not read yet");
        let error = streamed.read(&[0]).expect_err("it is no image");
        assert!(error.is_input && error.text.contains("a.png: it is no image"), "{error}");
    }
}
