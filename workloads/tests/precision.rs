//! Autocast to bf16 (`spec.training.precision.autocast`) on the CPU.

use std::cell::RefCell;

use psjobs_api::training::{NonFinite, Optimizer};
use psjobs_worker::data::Dataset as _;
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::local::Local;
use psjobs_worker::train::precision::in_bf16;
use psjobs_worker::train::throttle::Pace;
use psjobs_worker::train::{Outcome, Plan, UpdateError, train};
use psjobs_worker::{Metrics, Workload};
use psjobs_workloads::data::mnist::{self, Mnist};
use psjobs_workloads::data::streamed_images::Images;
use psjobs_workloads::model::convnet::ConvNet;
use psjobs_workloads::model::language::Sizes;
use psjobs_workloads::model::mlp::Mlp;
use psjobs_workloads::workload::digits::Digits;
use psjobs_workloads::workload::lm::{Cut, Lm};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

const BATCH: i64 = 32;
const STEPS: u64 = 40;

fn digits<M: ModuleT>(build: fn(&nn::Path) -> M) -> Digits<M> {
    let folder = mnist::default_folder().expect("HOME is set");
    Digits::new(Mnist::open(&folder, Device::Cpu).expect("`make mnist` was run"), build)
}

/// The network of `mnist` without its dropout, which draws other numbers for other types.
#[derive(Debug)]
struct WithoutDropout(ConvNet);

impl ModuleT for WithoutDropout {
    fn forward_t(&self, images: &Tensor, _train: bool) -> Tensor {
        self.0.forward_t(images, false)
    }
}

/// The losses of one batch in f32 and under autocast, and the gradients of both.
fn compare<W: Workload>(label: &str, workload: &W) {
    tch::manual_seed(1);
    let store = VarStore::new(Device::Cpu);
    let model = workload.model(&store.root());
    let examples: Vec<i64> = (0..BATCH).collect();
    let batch = || workload.training_set().batch(&examples);
    let exact = workload.loss(&model, batch());
    let low = in_bf16(|| workload.loss(&model, batch()));
    let (want, found) = (exact.double_value(&[]), low.double_value(&[]));
    assert!((want - found).abs() < 2e-2, "{label}: the loss is {found} instead of {want}");
    assert_ne!(want, found, "{label}: nothing was computed in bf16");
    let flat = Flat::of(&store);
    let (want, found) = (flat.gradients(&exact).expect("computes"), flat.gradients(&low).expect("computes"));
    for (parameter, found) in flat.parameters().iter().zip(&found) {
        assert_eq!(found.kind(), Kind::Float, "{label}: {}", parameter.name);
    }
    // All together: in the gradient of a bias large parts cancel out, and with them what bf16 keeps of it.
    let joined =
        |gradients: &[Tensor]| Tensor::cat(&gradients.iter().map(|part| part.flatten(0, -1)).collect::<Vec<_>>(), 0);
    let (want, found) = (joined(&want), joined(&found));
    let differs = (found - &want).norm().double_value(&[]) / want.norm().double_value(&[]);
    assert!(differs < 0.1, "{label}: the gradient differs by {differs} of its length");
}

#[test]
fn networks_under_autocast_have_nearly_the_loss_of_f32_and_gradients_in_f32() {
    compare("mlp", &digits(Mlp::new));
    compare("mnist", &digits(|path| WithoutDropout(ConvNet::new(path))));
}

/// True if libtorch is known to train an LSTM in bf16 on this CPU. It calls oneDNN, which needs AVX-512 for that on
/// x86-64. Other processors were not tried.
#[cfg(target_arch = "x86_64")]
fn trains_lstms_in_bf16() -> bool {
    use std::arch::is_x86_feature_detected;
    is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512dq")
}

#[cfg(not(target_arch = "x86_64"))]
fn trains_lstms_in_bf16() -> bool {
    false
}

#[test]
fn a_language_model_under_autocast_has_nearly_the_loss_of_f32_and_gradients_in_f32() {
    if !trains_lstms_in_bf16() {
        eprintln!("this CPU is not known to train an LSTM in bf16, so that none was");
        return;
    }
    let cut = Cut { window: 8, held_out: 9 };
    // The windows of one batch, the token that follows the last of them, and those that are held out.
    let tokens: Vec<i64> = (0..BATCH * 8 + 1 + 9).map(|place| place * place % 50).collect();
    compare("lm", &Lm::new(&tokens, cut, Sizes { words: 50, embedding: 8, hidden: 16 }, Device::Cpu));
}

/// A linear classifier that records the types of its scores and of its loss.
struct Recorded {
    digits: Digits<Mlp>,
    trained: RefCell<Vec<Kind>>,
    evaluated: RefCell<Vec<Kind>>,
}

impl Recorded {
    fn scores(model: &nn::Linear, images: &Tensor) -> Tensor {
        nn::Module::forward(model, &images.flatten(1, -1))
    }
}

impl Workload for Recorded {
    type Model = nn::Linear;
    type Data = Images;

    fn training_set(&self) -> Images {
        self.digits.training_set()
    }

    fn model(&self, path: &nn::Path) -> nn::Linear {
        nn::linear(path, 784, 10, nn::LinearConfig::default())
    }

    fn loss(&self, model: &nn::Linear, (images, labels): (Tensor, Tensor)) -> Tensor {
        let scores = Self::scores(model, &images);
        self.trained.borrow_mut().push(scores.kind());
        scores.log_softmax(-1, Kind::Float).nll_loss(&labels)
    }

    fn evaluate(&self, model: &nn::Linear) -> Metrics {
        let (images, _) = self.digits.training_set().batch(&[0, 1]);
        self.evaluated.borrow_mut().push(Self::scores(model, &images).kind());
        Metrics::new()
    }
}

#[test]
fn the_training_loop_computes_under_autocast_where_the_job_says_so() {
    for (autocast, kind) in [(false, Kind::Float), (true, Kind::BFloat16)] {
        let plan = Plan {
            epochs: 1,
            max_steps: Some(STEPS),
            batch: BATCH as usize,
            micro_batches: 2,
            autocast,
            elastic: false,
            adaptive: false,
            steps_per_exchange: 1,
            non_finite: NonFinite::Refuse,
            seed: 1,
            trainer: 0,
            trainers: 1,
            device: Device::Cpu,
            log_every: 10,
            evaluate_every: None,
            pace: Pace::default(),
            save: None,
        };
        let workload =
            Recorded { digits: digits(Mlp::new), trained: RefCell::default(), evaluated: RefCell::default() };
        let alone = |flat, _| Local::new(flat, &Optimizer::default()).map_err(UpdateError::from);
        let outcome = train(&workload, &plan, alone, || (), || false).expect("trains");
        let Outcome::Finished(result) = outcome else { panic!("it was not asked to stop") };
        assert_eq!(workload.trained.into_inner(), [kind; 2 * STEPS as usize]);
        assert_eq!(workload.evaluated.into_inner(), [Kind::Float], "evaluations stay in f32");
        assert!(result.metrics["loss"] < 2.0, "it learns: {result:?}");
    }
}
