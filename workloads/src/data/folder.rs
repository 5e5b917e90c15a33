//! Examples from a folder, read whole into memory: a folder for each class with a file for each example, or
//! files that hold examples, as each would alone.

use std::fs;
use std::path::{Path, PathBuf};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tch::vision::image;
use tch::{Kind, Tensor};

use super::csv::Table;
use super::example_file::{self, LabelledError, extension, safetensors};

/// Inputs `[n, ...]` and targets of all examples in `folder`.
///
/// # Errors
/// If a file cannot be read, or does not belong to the others; the error names it.
pub(super) fn read(folder: &Path) -> Result<(Tensor, Tensor), LabelledError> {
    let (folders, files): (Vec<_>, Vec<_>) = entries(folder)?.into_iter().partition(|entry| entry.is_dir());
    match (folders.first(), files.first()) {
        (None, None) => {
            unfit(folder, "it is empty; put one folder for each class into it, or files of examples".into())
        }
        (Some(class), Some(file)) => {
            let [class, file] = [class, file].map(|path| name(path));
            unfit(
                folder,
                format!(
                    "it holds the folder {class} and the file {file}; give one folder for each class, or files alone"
                ),
            )
        }
        (Some(_), None) => of_classes(&folders),
        (None, Some(_)) => of_parts(&files),
    }
}

/// Lists a folder by name, without hidden files.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, LabelledError> {
    let refuse = |source| LabelledError::Read { file: folder.to_owned(), source };
    let entries = fs::read_dir(folder).map_err(refuse)?.collect::<Result<Vec<_>, _>>().map_err(refuse)?;
    let mut paths: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| !name(path).starts_with('.'));
    paths.sort_unstable();
    Ok(paths)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn unfit<T>(file: &Path, problem: String) -> Result<T, LabelledError> {
    Err(LabelledError::Unfit { file: file.to_owned(), problem })
}

/// Classes are numbered in the order of their names. The examples are shuffled, always in the same way, so that
/// those at the end, which are tested on, are of all classes.
fn of_classes(folders: &[PathBuf]) -> Result<(Tensor, Tensor), LabelledError> {
    let mut files = Vec::new();
    for (folder, class) in folders.iter().zip(0_i64..) {
        let examples = entries(folder)?;
        if examples.is_empty() {
            return unfit(folder, "this class has no examples; put some into its folder, or remove it".into());
        }
        files.extend(examples.into_iter().map(|file| (file, class)));
    }
    let first = files[0].0.clone();
    files.shuffle(&mut ChaCha8Rng::seed_from_u64(0));
    let shape = example(&first)?.size();
    let (mut inputs, mut targets) = (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
    for (file, class) in &files {
        let input = example(file)?;
        alike(file, &input.size(), &first, &shape)?;
        inputs.push(input);
        targets.push(*class);
    }
    let classes: Vec<_> = folders.iter().map(|folder| name(folder)).collect();
    tracing::info!(examples = files.len(), classes = classes.join(","), "folders of classes are read");
    Ok((Tensor::stack(&inputs, 0), Tensor::from_slice(&targets)))
}

/// One example's input: an image `[3, height, width]` of values from 0 to 1, the numbers of a CSV, or the tensor
/// `inputs` of a safetensors file.
fn example(file: &Path) -> Result<Tensor, LabelledError> {
    match extension(file).as_str() {
        "png" | "jpg" | "jpeg" | "bmp" => {
            let read = image::load(file);
            let pixels = read.map_err(|source| LabelledError::Damaged { file: file.to_owned(), source })?;
            Ok(pixels.to_kind(Kind::Float) / 255.0)
        }
        "csv" => {
            let table = Table::open(file)?;
            let numbers = Tensor::from_slice(&table.values);
            Ok(if table.rows() == 1 { numbers } else { numbers.reshape([-1, table.columns as i64]) })
        }
        "safetensors" => {
            let [inputs] = safetensors(file, ["inputs"])?;
            Ok(inputs.to_kind(Kind::Float))
        }
        _ => unfit(file, "unknown kind of example; give .png, .jpg, .bmp, .csv or .safetensors".into()),
    }
}

/// One file behind the other.
fn of_parts(files: &[PathBuf]) -> Result<(Tensor, Tensor), LabelledError> {
    let mut parts: Vec<(Tensor, Tensor)> = Vec::with_capacity(files.len());
    for path in files {
        let (inputs, targets) = example_file::read(path)?;
        if let Some((before, aims)) = parts.first() {
            alike(path, &inputs.size()[1..], &files[0], &before.size()[1..])?;
            alike(path, &targets.size()[1..], &files[0], &aims.size()[1..])?;
        }
        parts.push((inputs, targets));
    }
    // Where one file has fractions, whole numbers of the others are numbers, too.
    let whole = parts.iter().all(|(_, targets)| !targets.is_floating_point());
    let kind = if whole { Kind::Int64 } else { Kind::Float };
    let (inputs, targets): (Vec<_>, Vec<_>) =
        parts.into_iter().map(|(inputs, targets)| (inputs, targets.to_kind(kind))).unzip();
    Ok((Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0)))
}

fn alike(file: &Path, found: &[i64], first: &Path, want: &[i64]) -> Result<(), LabelledError> {
    if found == want {
        return Ok(());
    }
    unfit(file, format!("an example has the shape {found:?}, in {} it is {want:?}; make them alike", first.display()))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::labelled::Labelled;
    use super::*;
    use psjobs_worker::data::Dataset as _;

    /// A folder with these text files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("temporary folder");
        for (name, contents) in files {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().expect("below the folder")).expect("made");
            fs::write(file, contents).expect("written");
        }
        folder
    }

    fn open(folder: &tempfile::TempDir) -> Result<Labelled, LabelledError> {
        Labelled::open(folder.path(), Device::Cpu)
    }

    /// Inputs and targets, sorted.
    fn contents(data: &Labelled) -> Vec<(Vec<f32>, f64)> {
        let all: Vec<i64> = (0..data.examples() as i64).collect();
        let mut found: Vec<_> = all
            .iter()
            .map(|example| {
                let (input, target) = data.batch(&[*example]);
                (Vec::try_from(input.flatten(0, -1)).expect("f32"), target.double_value(&[0]))
            })
            .collect();
        found.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
        found
    }

    #[test]
    fn folders_are_classes_and_files_their_examples() {
        let folder = folder(&[("cat/2.csv", "3,4"), ("dog/a.csv", "5,6"), ("cat/1.csv", "1,2"), ("dog/.hidden", "x")]);
        let data = open(&folder).expect("well formed").classes().expect("whole numbers");
        assert_eq!((data.input_shape(), data.class_count()), (vec![2], 2));
        assert_eq!(contents(&data), [(vec![1.0, 2.0], 0.0), (vec![3.0, 4.0], 0.0), (vec![5.0, 6.0], 1.0)]);
    }

    #[test]
    fn the_last_of_many_examples_are_of_all_classes() {
        let files: Vec<_> =
            (0..40).map(|i| (format!("{}/{i}.csv", if i < 20 { "a" } else { "b" }), "1,2\n3,4")).collect();
        let folder = folder(&files.iter().map(|(name, text)| (name.as_str(), *text)).collect::<Vec<_>>());
        let data = open(&folder).expect("well formed");
        assert_eq!(data.input_shape(), [2, 2]);
        let (_, test) = data.clone().split(10);
        let of_b = contents(&test).iter().filter(|(_, class)| *class == 1.0).count();
        assert!((1..10).contains(&of_b), "{of_b} of 10");
        assert_eq!(contents(&open(&folder).expect("again").split(10).1), contents(&test), "always the same");
    }

    #[test]
    fn images_have_three_channels_between_0_and_1() {
        let folder = folder(&[]);
        for (class, value) in [("dark", 51.0), ("light", 255.0)] {
            fs::create_dir(folder.path().join(class)).expect("made");
            let pixels = Tensor::full([3, 4, 5], value, tch::kind::FLOAT_CPU);
            image::save(&pixels, folder.path().join(class).join("1.png")).expect("written");
        }
        let data = open(&folder).expect("well formed");
        assert_eq!(data.input_shape(), [3, 4, 5]);
        assert_eq!(contents(&data), [(vec![0.2; 60], 0.0), (vec![1.0; 60], 1.0)]);
    }

    #[test]
    fn files_lie_one_behind_the_other() {
        let folder = folder(&[("1.csv", "x,y\n1,10\n2,20\n"), ("2.csv", "3,30\n")]);
        let tensors =
            [("inputs", Tensor::from_slice(&[4.0_f32]).view([1, 1])), ("targets", Tensor::from_slice(&[40_i64]))];
        Tensor::write_safetensors(&tensors, folder.path().join("3.safetensors")).expect("written");
        let data = open(&folder).expect("well formed");
        let (inputs, targets) = data.batch(&[0, 1, 2, 3]);
        assert_eq!(Vec::<f32>::try_from(inputs.flatten(0, -1)).expect("f32"), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(Vec::<f32>::try_from(targets).expect("f32"), [10.0, 20.0, 30.0, 40.0]);
    }

    #[test]
    fn what_does_not_belong_is_named_with_file_and_line() {
        let rows: [(&[(&str, &str)], &str); 10] = [
            (&[], "it is empty; put one folder for each class"),
            (&[("a/1.csv", "1"), ("readme.txt", "")], "the folder a and the file readme.txt"),
            (&[("a/1.csv", "1,2"), ("a/2.csv", "3,4\n5,x")], "a/2.csv, line 2: column 2 is \"x\""),
            (&[("a/1.csv", "1,2"), ("b/2.csv", "3")], "b/2.csv: an example has the shape [1], in "),
            (&[("a/1.csv", "1,2"), ("b/.keep", "")], "/b: this class has no examples"),
            (&[("a/1.png", "no image")], "cannot read "),
            (&[("a/1.tiff", "")], "a/1.tiff: unknown kind of example"),
            (&[("1.csv", "1,2"), ("2.csv", "1,2,3")], "2.csv: an example has the shape [2], in "),
            (&[("1.csv", "1,2"), ("2.txt", "1,2")], "2.txt: unknown kind of file"),
            (&[("1.csv", "1,2\n3\n")], "1.csv, line 2: it has 1 columns"),
        ];
        for (files, want) in rows {
            let error = open(&folder(files)).expect_err(want).to_string();
            assert!(error.contains(want) && !error.contains('\n'), "{want}: {error}");
        }
        let error = Labelled::open(Path::new("/no/such/folder"), Device::Cpu).expect_err("missing").to_string();
        assert!(error.contains("/no/such/folder; check that it is there"), "{error}");
    }
}
