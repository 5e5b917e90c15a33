//! Data of a URL, read a piece at a time: training goes as on the same data in memory.

use std::fs;
use std::path::Path;

use psjobs_worker::tch::{Kind, Tensor};
use psjobs_workloads::data::idx::Idx;
use psjobs_workloads::data::mnist::default_folder;

use crate::process::{command, end, free_port, read, run, start};

/// Writes MNIST as safetensors, the training set in two files.
fn write_safetensors(folder: &Path) {
    let mnist = default_folder().expect("known");
    for (name, part, files) in [("train", "train", 2), ("t10k", "test", 1)] {
        let images = Idx::<3>::open(&mnist.join(format!("{name}-images-idx3-ubyte"))).expect("MNIST");
        let labels = Idx::<1>::open(&mnist.join(format!("{name}-labels-idx1-ubyte"))).expect("MNIST");
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
    write_safetensors(&folder.path().join("data"));
    let place = format!("--master-port {}", free_port());
    let server = start(&format!("serve {place} --consistency sync --learning-rate 0.1"), &folder.path().join("server"));
    let data = format!("--data file://{}", folder.path().join("data").display());
    let args = format!("train mlp {place} --max-steps 300 --example-ms 1 --log-every 1 --device cpu {data}");
    let mut first = start(&args, &folder.path().join("trainer"));
    let mut log = std::io::BufReader::new(first.0.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("training step=20") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut log, &mut line).expect("text") > 0, "it ended before step 20");
    }
    first.0.kill().expect("it runs");
    drop(first);
    let (code, log) = end(start(&args, &folder.path().join("trainer")));
    assert_eq!(code, Some(0), "{log}");
    let (code, log) = end(server);
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(read(&folder.path().join("server")).steps, 300, "each step counts once");
}

#[test]
fn a_url_that_cannot_be_read_is_one_sentence() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let missing = format!("file://{}/missing", folder.path().display());
    for (url, said) in [("ftp://host/mnist", "give a folder"), (&*missing, "missing"), ("s3://b/a//b", "no bucket")] {
        let (code, log) = run(&mut command(&format!("train mlp --local --data {url}")));
        assert_eq!(code, Some(2), "{url}: {log}");
        assert!(log.contains(said) && !log.contains("panick"), "{url}: {log}");
    }
}
