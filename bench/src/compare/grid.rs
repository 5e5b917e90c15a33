//! The experiments, each of a few sections of a page, each of a few ways to train.

use std::collections::BTreeSet;

use clap::ValueEnum;
use psjobs::BadInput;
use psjobs::setting::Setting;
use psjobs_api::crd::ParameterServerJob;
use serde_json::{Value, json};

use crate::job;

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// Each consistency mode on even machines and with a slow one
    Modes,
    /// Thirty trainers that push gradients from old parameters: a constant learning rate against one that is
    /// divided by the staleness (Zhang et al., IJCAI 2016)
    Staleness,
    /// Each codec of gradients, over TCP on this machine and over a slow link (100 Mb/s between two network
    /// namespaces, which takes root, ip and tc)
    Codecs,
    /// One to 32 asynchronous trainers with momentum and nothing else changed: a momentum for each trainer (DANA, Hakimi et al.
    /// 2019), and one at the server
    Trainers,
    /// A language model in Sync against local steps (DiLoCo, Douillard et al. 2023), on this machine and over the slow link
    Local,
}

/// The measure of how good a model is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// As trainers report it.
    pub name: &'static str,
    /// In words.
    pub title: &'static str,
    /// Levels; the page shows when they were reached.
    pub levels: [f64; 2],
    /// Less is better.
    pub falls: bool,
    /// Digits behind the point.
    pub digits: usize,
}

const ACCURACY: Metric =
    Metric { name: "accuracy", title: "test accuracy", levels: [0.90, 0.95], falls: false, digits: 4 };
const PERPLEXITY: Metric =
    Metric { name: "perplexity", title: "perplexity of held-out text", levels: [400.0, 300.0], falls: true, digits: 1 };

impl Metric {
    /// Returns whether `value` is as good as `level`.
    pub fn reaches(self, value: f64, level: f64) -> bool {
        if self.falls { value <= level } else { value >= level }
    }
}

/// A way to train.
#[derive(Clone, Debug)]
pub struct Way {
    pub name: &'static str,
    /// spec.training but for the seed.
    training: Value,
    pub trainers: u32,
}

/// Ways that are drawn into one set of plots.
#[derive(Clone, Debug)]
pub struct Section {
    pub title: &'static str,
    /// One sentence that a reader must know.
    pub note: String,
    pub ways: Vec<Way>,
    /// The last trainer takes so many times as long.
    slow: Option<f64>,
    /// Blocks travel, although all processes are on one machine.
    tcp: bool,
}

/// The user's choices.
#[derive(Clone, Debug)]
pub struct Extent {
    pub trainers: u32,
    pub epochs: u32,
    /// Seconds between two evaluations.
    pub evaluate_every: u32,
    pub slow: f64,
    pub workload: String,
    /// Fields of every job.
    pub settings: Vec<Setting>,
}

/// One job: a way of a section, and a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    pub section: usize,
    pub way: usize,
    pub seed: u32,
}

/// Learning rate that staleness makes too large. One trainer learns well with it.
const BOLD: f64 = 0.2;
/// Trainers that codecs are compared with.
const PAIR: u32 = 2;
/// The learners of the paper.
const LEARNERS: u32 = 30;

impl Experiment {
    /// The page's heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Modes => "Consistency modes compared",
            Self::Staleness => "Stale gradients and the learning rate",
            Self::Codecs => "Codecs compared",
            Self::Trainers => "From one trainer to 32",
            Self::Local => "Local steps compared",
        }
    }

    /// Returns the metric by which models are compared.
    pub fn metric(self) -> Metric {
        if self == Self::Local { PERPLEXITY } else { ACCURACY }
    }

    /// Returns the way that the others are compared with, where that is the claim of a paper.
    pub fn baseline(self) -> Option<&'static str> {
        (self == Self::Local).then_some("Sync")
    }

    /// Returns whether the ways are measured over a slow link, too.
    pub fn has_link(self) -> bool {
        matches!(self, Self::Codecs | Self::Local)
    }

    pub fn sections(self, extent: &Extent) -> Vec<Section> {
        match self {
            Self::Modes => modes(extent),
            Self::Staleness => vec![staleness()],
            Self::Codecs => vec![codecs()],
            Self::Trainers => vec![
                trainers("A momentum for each trainer", "The default.", "PerTrainer"),
                trainers("One momentum", "With <code>staleness: {momentum: Shared}</code>.", "Shared"),
            ],
            Self::Local => vec![local(extent)],
        }
    }
}

/// Leaves the ways of these names only; all if there are no names.
pub fn only(mut sections: Vec<Section>, names: &[String]) -> anyhow::Result<Vec<Section>> {
    if names.is_empty() {
        return Ok(sections);
    }
    let all: BTreeSet<&str> = sections.iter().flat_map(|section| &section.ways).map(|way| way.name).collect();
    if let Some(unknown) = names.iter().find(|name| !all.contains(name.as_str())) {
        let known: Vec<_> = all.iter().map(|name| format!("{name:?}")).collect();
        return Err(BadInput::new(format!("there is no way {unknown:?}; --way takes {}", known.join(", "))).into());
    }
    for section in &mut sections {
        section.ways.retain(|way| names.iter().any(|name| name == way.name));
    }
    sections.retain(|section| !section.ways.is_empty());
    Ok(sections)
}

impl Way {
    /// Steps of a trainer for one exchange.
    pub fn steps_per_exchange(&self) -> u32 {
        self.training["local"]["steps"].as_u64().map_or(1, |steps| steps as u32)
    }
}

fn modes(extent: &Extent) -> Vec<Section> {
    let Extent { trainers, slow, .. } = *extent;
    let rate = json!({"type": "SGD", "learningRate": 0.05});
    // All modes at one learning rate, so that they differ in nothing else.
    let way = |name, consistency: Value| {
        let mut training = json!({"consistency": consistency, "optimizer": rate});
        if consistency["mode"] != "Sync" {
            training["staleness"] = json!({"policy": "None"});
        }
        Way { name, training, trainers }
    };
    let mut damped = way("Async, damped", json!({"mode": "Async"}));
    damped.training["staleness"] = json!({"policy": "Damped", "coefficient": 0.1});
    let ways = vec![
        way("Sync", json!({"mode": "Sync"})),
        way("Sync, 1 backup", json!({"mode": "Sync", "backupTrainers": 1})),
        way("Bounded (8)", json!({"mode": "Bounded", "staleness": 8})),
        way("Async", json!({"mode": "Async"})),
        damped,
    ];
    let even = format!("{trainers} trainers and one server, all at one learning rate (0.05).");
    let uneven = format!("The same, but trainer {} takes {slow} times as long for each step.", trainers - 1);
    vec![
        Section { title: "Even machines", note: even, ways: ways.clone(), slow: None, tcp: false },
        Section { title: "One slow trainer", note: uneven, ways, slow: Some(slow), tcp: false },
    ]
}

fn staleness() -> Section {
    let way = |name, policy, trainers| Way {
        name,
        training: json!({
            "consistency": {"mode": "Async"},
            "staleness": {"policy": policy},
            "optimizer": {"type": "SGD", "learningRate": BOLD},
            // A diverging run goes on to its end, for all to see.
            "nonFinite": "Skip",
        }),
        trainers,
    };
    Section {
        title: "Thirty trainers",
        note: format!(
            "All Async at learning rate {BOLD}; {LEARNERS} trainers, so that about as many updates come in between."
        ),
        ways: vec![
            way("1 trainer", "None", 1),
            way("30, constant rate", "None", LEARNERS),
            way("30, rate / staleness", "Inverse", LEARNERS),
        ],
        slow: None,
        tcp: false,
    }
}

fn codecs() -> Section {
    let way = |name, codec| Way {
        name,
        training: json!({
            "consistency": {"mode": "Sync"},
            "optimizer": {"type": "SGD", "learningRate": 0.1},
            "compression": {"codec": codec},
        }),
        trainers: PAIR,
    };
    Section {
        title: "Codecs",
        note: format!(
            "{PAIR} trainers and one server, Sync, learning rate 0.1, over TCP; TopK sends 1 % of the elements. With \
             any codec but F32 parameters come back as BF16."
        ),
        ways: vec![
            way("F32", "F32"),
            way("BF16", "BF16"),
            way("FP16", "FP16"),
            way("INT8", "INT8"),
            way("OneBit", "OneBit"),
            way("TopK", "TopK"),
        ],
        slow: None,
        tcp: true,
    }
}

fn trainers(title: &'static str, note: &str, momentum: &str) -> Section {
    let way = |name, trainers| Way {
        name,
        training: json!({
            "consistency": {"mode": "Async"},
            "staleness": {"momentum": momentum},
            "optimizer": {"type": "SGD", "learningRate": 0.01, "momentum": 0.9},
        }),
        trainers,
    };
    Section {
        title,
        note: format!("{note} All Async, SGD at .01 with momentum .9, as in <code>examples/mnist.yaml</code>."),
        ways: vec![
            way("1 trainer", 1),
            way("2 trainers", 2),
            way("4 trainers", 4),
            way("8 trainers", 8),
            way("16 trainers", 16),
            way("32 trainers", 32),
        ],
        slow: None,
        tcp: false,
    }
}

fn local(extent: &Extent) -> Section {
    let way = |name, mode, local: Value| Way {
        name,
        training: json!({
            "consistency": {"mode": mode},
            "optimizer": {"type": "Adam", "learningRate": 0.001},
            "local": local,
        }),
        trainers: extent.trainers,
    };
    let mut sync = way("Sync", "Sync", Value::Null);
    sync.training.as_object_mut().expect("an object").remove("local");
    Section {
        title: "Local steps",
        note: format!(
            "{} trainers and one server, Adam at .001. With local steps each trainer has an Adam of its own, and the server moves \
             along the mean of what they have changed after 10 or 50 steps. All over TCP.",
            extent.trainers
        ),
        ways: vec![
            sync,
            way("10 steps", "Sync", json!({"steps": 10})),
            way("50 steps", "Sync", json!({"steps": 50})),
            way("50, overlap", "Sync", json!({"steps": 50, "overlap": true})),
            way("50, Async", "Async", json!({"steps": 50})),
        ],
        slow: None,
        // Bytes are counted, so that they must travel.
        tcp: true,
    }
}

/// All runs, seed by seed: what the machine does meanwhile hits all ways alike.
pub fn runs(sections: &[Section], seeds: u32) -> Vec<Run> {
    let ways = || (0..).zip(sections).flat_map(|(section, of)| (0..of.ways.len()).map(move |way| (section, way)));
    (1..=seeds).flat_map(|seed| ways().map(move |(section, way)| Run { section, way, seed })).collect()
}

/// The job of a run.
pub fn job(sections: &[Section], run: &Run, extent: &Extent) -> anyhow::Result<ParameterServerJob> {
    let section = &sections[run.section];
    let Way { training, trainers, .. } = &section.ways[run.way];
    let mut training = training.clone();
    training["seed"] = json!(run.seed);
    let epochs = extent.epochs.to_string();
    let slow = section.slow.map(|factor| format!("{}:{factor}", trainers - 1));
    let every = extent.evaluate_every.to_string();
    let mut args = vec!["train", &extent.workload, "--epochs", &epochs, "--evaluate-every", &every];
    if let Some(slow) = &slow {
        args.extend(["--slow", slow]);
    }
    let mut job = job::set(&job::job("compare", training, *trainers, &args)?, &extent.settings)?;
    // A trainer that ends because its loss is no number is not to be tried again.
    job.spec.failure_policy.max_restarts = 0;
    let server = job.spec.ps.template.as_mut().and_then(|template| template.spec.as_mut());
    if let Some(server) = server.filter(|_| section.tcp) {
        let args = server.containers[0].args.get_or_insert_default();
        args.push("--no-shared-memory".into());
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent() -> Extent {
        let (workload, settings) = ("mlp".into(), Vec::new());
        Extent { trainers: 4, epochs: 1, evaluate_every: 1, slow: 3.0, workload, settings }
    }

    #[test]
    fn every_combination_runs_once_for_each_seed() {
        let rows = [
            (Experiment::Modes, 30),
            (Experiment::Staleness, 9),
            (Experiment::Codecs, 18),
            (Experiment::Trainers, 36),
            (Experiment::Local, 15),
        ];
        for (experiment, want) in rows {
            let runs = runs(&experiment.sections(&extent()), 3);
            let distinct: BTreeSet<_> = runs.iter().copied().collect();
            assert_eq!((runs.len(), distinct.len()), (want, want));
        }
    }

    #[test]
    fn ways_are_chosen_by_name_and_an_unknown_name_is_refused() {
        let names = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        for (experiment, chosen, want) in [
            (Experiment::Local, "50 steps,Sync", vec![vec!["Sync", "50 steps"]]),
            (Experiment::Modes, "Async", vec![vec!["Async"], vec!["Async"]]),
        ] {
            let sections = only(experiment.sections(&extent()), &names(chosen)).expect("they are there");
            let found: Vec<Vec<_>> = sections.iter().map(|of| of.ways.iter().map(|way| way.name).collect()).collect();
            assert_eq!(found, want);
        }
        let error = only(Experiment::Local.sections(&extent()), &names("Sync,5 steps")).expect_err("no such way");
        assert!(error.to_string().contains("\"5 steps\"") && error.to_string().contains("\"50 steps\""), "{error}");
    }

    #[test]
    fn a_setting_holds_for_every_run_and_a_wrong_one_is_refused() {
        let set = |text: &str| Extent { settings: vec![text.parse().expect("a setting")], ..extent() };
        let sections = Experiment::Trainers.sections(&extent());
        for run in runs(&sections, 1) {
            let job = job(&sections, &run, &set("training.consistency.overlap=true")).expect("a job");
            assert!(job.spec.training.overlaps_exchanges());
            assert_eq!(job.spec.training.seed, u64::from(run.seed), "what the run says stays");
        }
        let run = runs(&sections, 1)[0];
        let error = job(&sections, &run, &set("training.consistency.mode=Sync")).expect_err("a momentum in Sync");
        assert!(format!("{error:#}").contains("staleness.momentum"), "{error:#}");
        assert!(job(&sections, &run, &set("training.consistency.overlaps=true")).is_err(), "no such field");
    }

    #[test]
    fn every_run_is_a_valid_job() {
        for experiment in Experiment::value_variants().iter().copied() {
            let sections = experiment.sections(&extent());
            for run in runs(&sections, 1) {
                let job = job(&sections, &run, &extent()).expect("a job");
                job.spec.training.validate().expect("valid");
                let serve =
                    &job.spec.ps.template.as_ref().and_then(|t| t.spec.as_ref()).expect("a spec").containers[0].args;
                let travels = serve.iter().flatten().any(|arg| arg == "--no-shared-memory");
                assert_eq!(travels, experiment.has_link(), "{serve:?}");
                let args = &job.spec.trainer.template.spec.expect("a spec").containers[0].args;
                let slow = experiment == Experiment::Modes && run.section == 1;
                assert_eq!(args.iter().flatten().any(|arg| arg == "3:3"), slow, "{args:?}");
            }
        }
    }
}
