//! The network on one server, and on several, gives the gradients that it gives here, step after step. The test is alone in
//! its binary: dropout draws from the one generator of the process.

mod job;

use std::time::Duration;

use job::Job;
use psjobs_api::Training;
use psjobs_api::training::Optimizer;
use psjobs_rpc::Registry;
use psjobs_rpc::autograd::{Context, DistributedOptimizer};
use psjobs_worker::train::flat::Flat;
use psjobs_worker::train::local::Local;
use psjobs_worker::train::modules::Participant;
use psjobs_workloads::model::convnet::ConvNet;
use psjobs_workloads::workload::mnist_remote::Network;
use tch::nn::ModuleT as _;
use tch::{Device, Kind, Tensor, nn};

const SEED: i64 = 7;
const STEPS: u64 = 4;

fn assert_close(found: &Tensor, want: &Tensor, what: &str) {
    assert_eq!(found.size(), want.size(), "{what}");
    let error = (found - want).abs().max().double_value(&[]);
    assert!(error < 1e-6, "{what} is off by {error}");
}

#[test]
fn gradients_and_parameters_equal_those_of_a_local_model() {
    for servers in [1, 2, 3] {
        equal_those_of_a_local_model(servers);
    }
}

fn equal_those_of_a_local_model(servers: u32) {
    let job = Job::start(servers, 1, Training::default());
    let timeout = Duration::from_secs(20);
    let participant =
        Participant::join(&job.trainer(0), Registry::default(), Vec::new(), STEPS, timeout).expect("it is up");
    let network = Network::on(participant.servers(), SEED, Some(0)).expect("made");
    assert_eq!(network.pieces().len(), servers as usize);
    let arguments = Optimizer { learning_rate: 0.03, momentum: 0.9, ..Optimizer::default() };
    let parameters = network.parameter_rrefs().expect("known");
    let optimizer = DistributedOptimizer::new(participant.endpoint(), &parameters, &arguments).expect("made");

    tch::manual_seed(SEED);
    let store = nn::VarStore::new(Device::Cpu);
    let local = ConvNet::new(&store.root());
    let flat = Flat::of(&store);
    assert_eq!(
        parameters.iter().map(|p| &p.name).collect::<Vec<_>>(),
        flat.parameters().iter().map(|p| &p.name).collect::<Vec<_>>()
    );
    let mut updater = Local::new(Flat::of(&store), &arguments).expect("usable");

    for step in 0..STEPS {
        let images = Tensor::randn([8, 1, 28, 28], tch::kind::FLOAT_CPU);
        let labels = Tensor::randint(10, [8], tch::kind::INT64_CPU);
        // The same units are dropped in both.
        tch::manual_seed(step as i64);
        let context = Context::new(participant.endpoint());
        let loss = network.forward(&context, &images).expect("forward").nll_loss(&labels);
        context.backward(&[&loss]).expect("backward");
        let of = |piece| context.gradients(piece).expect("known");
        let gradients: Vec<_> = network.pieces().iter().flat_map(of).collect();
        optimizer.step(&context).expect("step");

        tch::manual_seed(step as i64);
        let want = local.forward_t(&images, true).nll_loss(&labels);
        updater.step(step, &want).expect("updated");
        assert_close(&loss, &want, "the loss");
        let values: Vec<_> = network.pieces().iter().flat_map(|piece| piece.parameters().expect("known")).collect();
        assert_eq!((gradients.len(), values.len()), (8, 8));
        for ((parameter, gradient), value) in flat.parameters().iter().zip(gradients).zip(values) {
            let (name, gradient) = (&parameter.name, gradient.expect("every parameter has one"));
            assert!(gradient.abs().max().double_value(&[]) > 0.0, "the gradient of {name} is zero");
            assert_close(&gradient, &parameter.tensor.grad(), &format!("step {step}: the gradient of {name}"));
            assert_close(&value, &parameter.tensor.detach(), &format!("step {step}: {name}"));
        }
    }
    // Evaluation drops nothing.
    let images = Tensor::randn([8, 1, 28, 28], tch::kind::FLOAT_CPU);
    let output = network.evaluate(&images).expect("forward");
    assert_close(&output, &local.forward_t(&images, false), "the output");
    assert_eq!(output.kind(), Kind::Float);
    drop((network, parameters, optimizer));
    participant.leave(Some(&Default::default())).expect("it listens");
    job.join();
}
