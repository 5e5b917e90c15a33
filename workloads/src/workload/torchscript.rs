//! A TorchScript module from a file, with the loss that the user names. Its parameters train by push and
//! pull; its buffers, such as a batch norm's running statistics, are every trainer's own.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use tch::nn;
use tch::{CModule, Device, Kind, Reduction, TchError, Tensor};

use psjobs_worker::data::Dataset;
use psjobs_worker::device::evaluation_batch;
use psjobs_worker::{Metrics, Workload};

/// Examples that evaluation reads at once on a CPU.
const EVALUATION_BATCH: usize = 64;

/// How many times as much memory a layer of the module may take as its inputs and outputs: its sizes are not known.
const WIDEST_LAYER: usize = 16;

/// The loss between the module's output and the targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Loss {
    /// Negative log-likelihood; the module gives log-probabilities
    Nll,
    /// Cross-entropy; the module gives scores
    CrossEntropy,
    /// Mean squared error; the module gives numbers
    Mse,
}

impl Loss {
    /// True where targets are numbers of classes.
    #[must_use]
    pub fn classifies(self) -> bool {
        self != Self::Mse
    }

    fn of(self, output: &Tensor, targets: &Tensor, reduction: Reduction) -> Tensor {
        match self {
            Self::Nll => output.g_nll_loss::<Tensor>(targets, None, reduction, -100),
            Self::CrossEntropy => output.cross_entropy_loss::<Tensor>(targets, None, reduction, -100, 0.0),
            Self::Mse => output.view_as(targets).mse_loss(targets, reduction),
        }
    }
}

/// The module's file and what it is trained on: `D` gives inputs and targets.
pub struct TorchScript<D> {
    source: Source,
    loss: Loss,
    train: D,
    test: D,
    numbers: Numbers,
}

/// How many numbers an example has.
#[derive(Clone, Copy, Debug, Default)]
struct Numbers {
    inputs: i64,
    /// Given by the module.
    outputs: i64,
}

impl<D> fmt::Debug for TorchScript<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchScript").field("file", &self.source.file).finish_non_exhaustive()
    }
}

/// A module cannot be trained on this data; the text says why and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TorchScriptError {
    #[error("cannot read {}; check that it is there and readable", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{} is no TorchScript module that libtorch can load ({reason}); write it with torch.jit.script(model).save(\"model.pt\")", file.display())]
    Load { file: PathBuf, reason: String },
    #[error("{} has no parameters that require a gradient; export the model in training mode, and do not freeze it", .0.display())]
    NoParameters(PathBuf),
    #[error("parameter {name} of {} is {kind:?}; servers keep f32, so export model.float()", file.display())]
    Kind { file: PathBuf, name: String, kind: Kind },
    #[error("{} fails on inputs of the shape {shape:?}: {reason}; give the shape of one example with --input-shape", file.display())]
    Forward { file: PathBuf, shape: Vec<i64>, reason: String },
    #[error("{} gives the shape {found:?} for inputs of the shape {shape:?}; --loss {loss} needs {want}", file.display())]
    Output { file: PathBuf, shape: Vec<i64>, found: Vec<i64>, loss: &'static str, want: String },
    #[error("{} cannot be trained: {reason}", file.display())]
    Backward { file: PathBuf, reason: String },
    #[error("the test set does not fit the module: {0}")]
    TestSet(Box<TorchScriptError>),
}

/// The bytes of a module, so that every model that is made of them is the same.
struct Source {
    file: PathBuf,
    bytes: Vec<u8>,
    device: Device,
}

impl Source {
    fn load(&self) -> Result<CModule, TorchScriptError> {
        let loaded = CModule::load_data_on_device(&mut self.bytes.as_slice(), self.device);
        loaded.map_err(|error| TorchScriptError::Load { file: self.file.clone(), reason: reason(&error) })
    }
}

/// The line of libtorch's error that says what was wrong; the others are traces.
fn reason(error: &TchError) -> String {
    let text = error.to_string();
    let said = text.lines().find_map(|line| line.trim().strip_prefix("RuntimeError: "));
    said.or(text.lines().next()).unwrap_or_default().to_owned()
}

impl<D: Dataset<Batch = (Tensor, Tensor)>> TorchScript<D> {
    /// Reads the module, runs it forward and backward on a few examples of `train`, and evaluates a few of `test`. Where
    /// targets are classes, they are below `classes`.
    ///
    /// # Errors
    /// If the module cannot be loaded, or does not fit the data or the loss.
    pub fn open(
        file: &Path,
        device: Device,
        loss: Loss,
        classes: i64,
        train: D,
        test: D,
    ) -> Result<Self, TorchScriptError> {
        let bytes = fs::read(file).map_err(|source| TorchScriptError::Read { file: file.to_owned(), source })?;
        let source = Source { file: file.to_owned(), bytes, device };
        let mut workload = Self { source, loss, train, test, numbers: Numbers::default() };
        workload.numbers = workload.check(classes)?;
        Ok(workload)
    }

    /// Changes both sets by `change`, which takes the number of classes that the module tells apart. Does nothing where targets
    /// are no classes.
    #[must_use]
    pub fn with_classes(self, change: impl Fn(D, i64) -> D) -> Self {
        if !self.loss.classifies() {
            return self;
        }
        let Self { train, test, numbers, .. } = self;
        Self { train: change(train, numbers.outputs), test: change(test, numbers.outputs), ..self }
    }

    /// Returns the numbers of an example. On a module of its own: running it changes buffers.
    fn check(&self, classes: i64) -> Result<Numbers, TorchScriptError> {
        let mut module = self.source.load()?;
        module.set_train();
        let file = || self.source.file.clone();
        let parameters = module.named_parameters().map_err(|e| self.backward(&e))?;
        let trainable = || parameters.iter().filter(|(_, tensor)| tensor.requires_grad());
        if trainable().count() == 0 {
            return Err(TorchScriptError::NoParameters(file()));
        }
        if let Some((name, tensor)) = trainable().find(|(_, tensor)| tensor.kind() != Kind::Float) {
            return Err(TorchScriptError::Kind { file: file(), name: name.clone(), kind: tensor.kind() });
        }
        let (inputs, output, targets) = self.try_out(&module, &self.train, classes)?;
        let outputs = output.size().last().copied().unwrap_or(1);
        let numbers = Numbers { inputs: inputs.iter().skip(1).product(), outputs };
        self.loss.of(&output, &targets, Reduction::Mean).f_backward().map_err(|error| self.backward(&error))?;
        module.set_eval();
        let evaluated = tch::no_grad(|| self.try_out(&module, &self.test, classes));
        evaluated.map(|_| numbers).map_err(|error| TorchScriptError::TestSet(Box::new(error)))
    }

    /// Returns the shape of a few examples' inputs from `data`, what the module gives for them, and their targets, which it fits.
    fn try_out(
        &self,
        module: &CModule,
        data: &D,
        classes: i64,
    ) -> Result<(Vec<i64>, Tensor, Tensor), TorchScriptError> {
        let file = || self.source.file.clone();
        let examples: Vec<i64> = (0..data.examples().min(4) as i64).collect();
        let (inputs, targets) = data.batch(&examples);
        let shape = inputs.size();
        let output = module.forward_ts(&[inputs]).map_err(|error| TorchScriptError::Forward {
            file: file(),
            shape: shape.clone(),
            reason: reason(&error),
        })?;
        let (loss, fits, want) = match self.loss {
            Loss::Mse => {
                let fits = output.numel() == targets.numel();
                ("mse", fits, format!("as many numbers as the targets, of the shape {:?}", targets.size()))
            }
            kind => {
                let size = output.size();
                let fits = matches!(*size, [rows, columns] if rows == shape[0] && columns >= classes);
                let name = if kind == Loss::Nll { "nll" } else { "cross-entropy" };
                (
                    name,
                    fits,
                    format!("[{}, C] with C of at least {classes}, the number of classes in the data", shape[0]),
                )
            }
        };
        if !fits {
            return Err(TorchScriptError::Output { file: file(), shape, found: output.size(), loss, want });
        }
        Ok((shape, output, targets))
    }

    /// Returns how many examples evaluation reads at once.
    fn evaluated_at_once(&self) -> usize {
        let Numbers { inputs, outputs } = self.numbers;
        let bytes = (inputs + outputs) as usize * size_of::<f32>() * WIDEST_LAYER;
        evaluation_batch(self.source.device, EVALUATION_BATCH, bytes)
    }

    fn backward(&self, error: &TchError) -> TorchScriptError {
        TorchScriptError::Backward { file: self.source.file.clone(), reason: reason(error) }
    }
}

impl<D: Dataset<Batch = (Tensor, Tensor)> + Clone + Send + 'static> Workload for TorchScript<D> {
    type Model = RefCell<CModule>;
    type Data = D;

    fn training_set(&self) -> D {
        self.train.clone()
    }

    /// The values are the file's, whatever the seed.
    fn model(&self, path: &nn::Path) -> RefCell<CModule> {
        let module = self.source.load().expect("the same bytes were loaded before");
        let parameters = module.named_parameters().expect("they were listed before");
        for (name, tensor) in parameters {
            let trainable = tensor.requires_grad();
            // A dot separates the parts of a path.
            let _ = path.add(&name.replace('.', "_"), tensor, trainable);
        }
        RefCell::new(module)
    }

    fn loss(&self, model: &RefCell<CModule>, (inputs, targets): (Tensor, Tensor)) -> Tensor {
        let mut module = model.borrow_mut();
        module.set_train();
        let output = module.forward_ts(&[inputs]).expect("a batch of the same shape went through before");
        self.loss.of(&output, &targets, Reduction::Mean)
    }

    /// `test_loss`, and `accuracy` where targets are classes.
    fn evaluate(&self, model: &RefCell<CModule>) -> Metrics {
        let mut module = model.borrow_mut();
        module.set_eval();
        let (mut loss, mut right) = (0.0, 0.0);
        let examples: Vec<i64> = (0..self.test.examples() as i64).collect();
        let mut numbers = 0;
        for examples in examples.chunks(self.evaluated_at_once()) {
            let (inputs, targets) = self.test.batch(examples);
            let output = module.forward_ts(&[inputs]).expect("examples of the same shape went through before");
            loss += self.loss.of(&output, &targets, Reduction::Sum).double_value(&[]);
            numbers += targets.numel();
            if self.loss.classifies() {
                right += output.argmax(-1, false).eq_tensor(&targets).sum(Kind::Float).double_value(&[]);
            }
        }
        let mut metrics = Metrics::from([("test_loss".to_owned(), loss / numbers as f64)]);
        if self.loss.classifies() {
            metrics.insert("accuracy".to_owned(), right / numbers as f64);
        }
        metrics
    }

    /// A TorchScript module again, with this trainer's buffers.
    fn save(&self, model: &RefCell<CModule>, _store: &nn::VarStore, file: &Path) -> Result<(), TchError> {
        let mut module = model.borrow_mut();
        module.set_eval();
        module.save(file)
    }
}
