//! Data of a URL, read a piece at a time: training goes as on the same data in memory.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use psjobs_worker::tch::{Kind, Tensor};
use psjobs_workloads::data::idx::Idx;
use psjobs_workloads::data::mnist::default_folder;

use crate::process::{command, end, free_port, read, run, start};

/// Images and labels of a part of MNIST.
fn mnist(name: &str) -> (Idx<3>, Idx<1>) {
    let mnist = default_folder().expect("known");
    let images = Idx::open(&mnist.join(format!("{name}-images-idx3-ubyte"))).expect("MNIST");
    let labels = Idx::open(&mnist.join(format!("{name}-labels-idx1-ubyte"))).expect("MNIST");
    (images, labels)
}

/// Writes some of MNIST as CSV: for 100 steps of 32 examples, and for tests.
fn write_csv(folder: &Path) {
    for (name, part, count) in [("train", "train", 3200), ("t10k", "test", 320)] {
        let (images, labels) = mnist(name);
        let pixels = images.dims[1] * images.dims[2];
        let lines = images.data.chunks(pixels).zip(&labels.data).take(count).map(|(pixels, label)| {
            let pixels: Vec<String> = pixels.iter().map(ToString::to_string).collect();
            format!("{},{label}\n", pixels.join(","))
        });
        fs::create_dir_all(folder.join(part)).expect("made");
        fs::write(folder.join(part).join("a.csv"), lines.collect::<String>()).expect("written");
    }
}

/// The pieces in a cache, each with the number of its file, which another file of the same name does not have.
fn pieces(cache: &Path) -> BTreeMap<OsString, u64> {
    let entries = fs::read_dir(cache).expect("a cache").map(|entry| entry.expect("an entry"));
    entries.map(|entry| (entry.file_name(), entry.metadata().expect("a file").ino())).collect()
}

/// Writes MNIST as safetensors, the training set in two files.
fn write_safetensors(folder: &Path) {
    for (name, part, files) in [("train", "train", 2), ("t10k", "test", 1)] {
        let (images, labels) = mnist(name);
        let shape = images.dims.map(|size| size as i64);
        let images = Tensor::from_data_size(&images.data, &shape, Kind::Uint8);
        let labels = Tensor::from_slice(&labels.data);
        fs::create_dir_all(folder.join(part)).expect("made");
        let each = shape[0] / files;
        for file in 0..files {
            let cut = |tensor: &Tensor| tensor.narrow(0, file * each, each).contiguous();
            let tensors = [("images", cut(&images)), ("labels", cut(&labels))];
            let path = folder.join(part).join(format!("part-{file}.safetensors"));
            Tensor::write_safetensors(&tensors, path).expect("written");
        }
    }
}

#[test]
fn training_on_a_url_gives_the_model_of_training_in_memory() {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_safetensors(&folder.path().join("data"));
    let train = |data: &str, name: &str| {
        let model = folder.path().join(format!("{name}.safetensors"));
        let save = model.display();
        let args = format!("train mlp --local --learning-rate 0.1 --max-steps 400 --device cpu --save {save} {data}");
        let (code, log) = end(start(&args, &folder.path().join(name)));
        assert_eq!(code, Some(0), "{log}");
        (fs::read(model).expect("saved"), read(&folder.path().join(name)).metrics["accuracy"])
    };
    let url = format!("--data file://{}", folder.path().join("data").display());
    let (whole, streamed) = (train("", "whole"), train(&url, "streamed"));
    assert!(whole.0 == streamed.0, "the models differ");
    assert_eq!(whole.1, streamed.1);
}

#[test]
fn a_killed_trainer_goes_on_with_the_data_of_a_url() {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_csv(&folder.path().join("data"));
    let cache = folder.path().join("cache");
    let place = format!("--master-port {}", free_port());
    let server = start(&format!("serve {place} --consistency sync --learning-rate 0.1"), &folder.path().join("server"));
    let data = format!("--data file://{}", folder.path().join("data").display());
    let data = format!("{data} --data-cache-dir {}", cache.display());
    let args = format!("train mlp {place} --epochs 3 --example-ms 1 --log-every 1 --device cpu {data}");
    let mut first = start(&args, &folder.path().join("trainer"));
    let mut log = std::io::BufReader::new(first.0.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("training step=20") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut log, &mut line).expect("text") > 0, "it ended before step 20");
    }
    first.0.kill().expect("it runs");
    drop(first);
    let fetched = pieces(&cache);
    assert_eq!(fetched.len(), 4, "marks and rows of two files");
    let (code, log) = end(start(&args, &folder.path().join("trainer")));
    assert_eq!(code, Some(0), "{log}");
    let (code, log) = end(server);
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(read(&folder.path().join("server")).steps, 300, "each step counts once");
    assert_eq!(pieces(&cache), fetched, "nothing is fetched again");
}

#[test]
fn a_url_that_cannot_be_read_is_one_sentence() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let missing = format!("file://{}/missing", folder.path().display());
    for (workload, url, said) in [
        ("mlp", "ftp://host/mnist", "give a folder"),
        ("mlp", &*missing, "missing"),
        ("mlp", "s3://b/a//b", "no bucket"),
        ("lm", "s3://b/text", "URLs are for mnist, mlp and torchscript"),
    ] {
        let (code, log) = run(&mut command(&format!("train {workload} --local --data {url}")));
        assert_eq!(code, Some(2), "{url}: {log}");
        assert!(log.contains(said) && !log.contains("panick"), "{url}: {log}");
    }
}
