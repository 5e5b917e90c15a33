//! Every rule against its definition in double precision, written down once more from PyTorch's
//! documentation and the papers. (The worker's tests hold the rules against libtorch itself.)

use super::*;

/// One coordinate: weight and state, all zero at the start but the weight.
#[derive(Default)]
struct Coordinate {
    w: f64,
    a: f64,
    b: f64,
    c: f64,
}

/// Step `t`, from 1, with gradient `g` at rate `lr`.
fn define(spec: &training::Optimizer, s: &mut Coordinate, g: f64, lr: f64, t: i32) {
    let decay = spec.weight_decay;
    let g = if matches!(spec.kind, OptimizerKind::AdamW | OptimizerKind::Ftrl) { g } else { g + decay * s.w };
    match spec.kind {
        OptimizerKind::Sgd => {
            s.a = if t == 1 { g } else { spec.momentum * s.a + g };
            s.w -= lr * if spec.nesterov { g + spec.momentum * s.a } else { s.a };
        }
        OptimizerKind::Adam | OptimizerKind::AdamW => {
            if spec.kind == OptimizerKind::AdamW {
                s.w -= lr * decay * s.w;
            }
            s.a = spec.beta1 * s.a + (1.0 - spec.beta1) * g;
            s.b = spec.beta2 * s.b + (1.0 - spec.beta2) * g * g;
            s.c = s.c.max(s.b);
            let mean = s.a / (1.0 - spec.beta1.powi(t));
            let square = if spec.amsgrad { s.c } else { s.b } / (1.0 - spec.beta2.powi(t));
            s.w -= lr * mean / (square.sqrt() + spec.epsilon);
        }
        OptimizerKind::Adagrad => {
            if t == 1 {
                s.a = spec.initial_accumulator;
            }
            s.a += g * g;
            s.w -= lr / (1.0 + f64::from(t - 1) * spec.learning_rate_decay) * g / (s.a.sqrt() + spec.epsilon);
        }
        OptimizerKind::RmsProp => {
            s.a = spec.alpha * s.a + (1.0 - spec.alpha) * g * g;
            s.b = spec.alpha * s.b + (1.0 - spec.alpha) * g;
            let variance = if spec.centered { s.a - s.b * s.b } else { s.a };
            s.c = spec.momentum * s.c + g / (variance.sqrt() + spec.epsilon);
            s.w -= lr * s.c;
        }
        OptimizerKind::Ftrl => {
            // a: z, b: n, c: 1/eta.
            if t == 1 {
                s.c = spec.beta / lr;
                s.a = if s.w == 0.0 { 0.0 } else { -s.w * (s.c + spec.l2) - s.w.signum() * spec.l1 };
            }
            s.b += g * g;
            let inverse_eta = (spec.beta + s.b.sqrt()) / lr;
            s.a += g - (inverse_eta - s.c) * s.w;
            s.c = inverse_eta;
            s.w = if s.a.abs() <= spec.l1 { 0.0 } else { -(s.a - s.a.signum() * spec.l1) / (s.c + spec.l2) };
        }
    }
}

/// Gradients of both signs and of several magnitudes up to 1; coordinate 0 has a constant one.
fn json(spec: &str) -> training::Optimizer {
    serde_json::from_str(spec).expect("parses")
}

fn gradient(step: usize, coordinate: usize) -> f32 {
    0.1 + 0.9 * ((step * coordinate) as f32).sin() * (coordinate as f32 / 50.0)
}

#[test]
fn updates_follow_their_definition_for_100_steps() {
    let json = |json: &str| serde_json::from_str::<training::Optimizer>(json).expect(json);
    for spec in [
        r#"{"type": "SGD", "learningRate": 0.05}"#,
        r#"{"type": "SGD", "learningRate": 0.05, "weightDecay": 0.01}"#,
        r#"{"type": "SGD", "learningRate": 0.05, "momentum": 0.9}"#,
        r#"{"type": "SGD", "learningRate": 0.05, "momentum": 0.9, "nesterov": true, "weightDecay": 0.001}"#,
        r#"{"type": "Adam"}"#,
        r#"{"type": "Adam", "weightDecay": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 0.001}"#,
        r#"{"type": "Adam", "amsgrad": true}"#,
        // 1 - rate x decay is a number that f32 has: libtorch rounds it to f32 too.
        r#"{"type": "AdamW", "learningRate": 0.0078125, "weightDecay": 0.015625}"#,
        r#"{"type": "AdamW", "learningRate": 0.0078125, "weightDecay": 0.125, "amsgrad": true}"#,
        r#"{"type": "Adagrad"}"#,
        r#"{"type": "Adagrad", "learningRateDecay": 0.1, "weightDecay": 0.01, "initialAccumulator": 0.5, "epsilon": 0.01}"#,
        r#"{"type": "RMSprop"}"#,
        r#"{"type": "RMSprop", "alpha": 0.9, "weightDecay": 0.01, "epsilon": 0.01}"#,
        r#"{"type": "RMSprop", "momentum": 0.5}"#,
        r#"{"type": "RMSprop", "centered": true, "epsilon": 0.01}"#,
        r#"{"type": "RMSprop", "centered": true, "momentum": 0.5, "epsilon": 0.01}"#,
        r#"{"type": "FTRL", "learningRate": 0.1}"#,
        r#"{"type": "FTRL", "learningRate": 0.1, "beta": 0.5, "l1": 2.0, "l2": 0.1}"#,
    ] {
        let optimizer = Optimizer::new(&json(spec));
        for factor in [|_| 1.0, |t| 0.5_f64.powi(t / 20)] {
            // Not a multiple of any vector's length.
            let start = |i: usize| (i as f32 * 0.37).sin() * 0.3;
            let mut weights: Vec<f32> = (0..531).map(start).collect();
            let mut state = optimizer.state(weights.len());
            let mut want: Vec<Coordinate> =
                (0..weights.len()).map(|i| Coordinate { w: start(i).into(), ..Coordinate::default() }).collect();
            for t in 1..=100 {
                let gradient: Vec<f32> = (0..weights.len()).map(|i| gradient(t as usize, i % 50)).collect();
                let bytes: Vec<[u8; 4]> = gradient.iter().map(|g| g.to_le_bytes()).collect();
                optimizer.apply(&mut weights, &bytes, &mut state, factor(t));
                for (s, g) in want.iter_mut().zip(&gradient) {
                    define(&json(spec), s, f64::from(*g), json(spec).learning_rate * factor(t), t);
                }
            }
            for (i, (found, want)) in weights.iter().zip(&want).enumerate() {
                let error = (f64::from(*found) - want.w).abs() / want.w.abs().max(1.0);
                assert!(error < 1e-6, "{spec}, element {i}: {found} instead of {}", want.w);
            }
        }
    }
}

#[test]
fn a_group_is_trained_as_a_block_of_its_own_with_other_arguments() {
    for kind in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"] {
        let spec = |rate: f64, decay: f64| {
            json(&format!(r#"{{"type":"{kind}","learningRate":{rate},"weightDecay":{decay}}}"#))
        };
        let optimizer = Optimizer::new(&spec(0.5, 0.125));
        let group = ParameterGroup { learning_rate_factor: 0.25, weight_decay: Some(0.0) };
        let stretches = [
            Stretch { range: 0..13, group: ParameterGroup::default() },
            Stretch { range: 13..14, group },
            Stretch { range: 14..40, group: ParameterGroup::default() },
        ];
        let start: Vec<f32> = (0..40).map(|i| (i as f32).cos()).collect();
        let gradient = |t: usize| (0..40).map(|i| gradient(t, i).to_le_bytes()).collect::<Vec<_>>();
        let (mut weights, mut state) = (start.clone(), optimizer.state(40));
        (1..=3).for_each(|t| optimizer.apply_by_group(&mut weights, &gradient(t), &mut state, 0.5, &stretches));
        for (range, optimizer) in
            [(0..13, &optimizer), (13..14, &Optimizer::new(&spec(0.125, 0.0))), (14..40, &optimizer)]
        {
            let (mut alone, mut state) = (start[range.clone()].to_vec(), optimizer.state(range.len()));
            (1..=3).for_each(|t| optimizer.apply(&mut alone, &gradient(t)[range.clone()], &mut state, 0.5));
            assert_eq!(weights[range.clone()], alone, "{kind}, {range:?}");
        }
    }
}

#[test]
fn a_step_in_parts_is_one_step() {
    for kind in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "FTRL"] {
        let optimizer = Optimizer::new(&json(&format!(r#"{{"type":"{kind}","momentum":0.9,"centered":true}}"#)));
        let (mut whole, mut in_parts): (Vec<f32>, Vec<f32>) =
            (0..40).map(|i| ((i as f32).cos(), (i as f32).cos())).unzip();
        let (mut of_whole, mut of_parts) = (optimizer.state(40), optimizer.state(40));
        for t in 1..=3 {
            let gradient: Vec<_> = (0..40).map(|i| gradient(t, i).to_le_bytes()).collect();
            optimizer.apply(&mut whole, &gradient, &mut of_whole, 0.5);
            of_parts.begin_step();
            for range in [0..16, 16..32, 32..40] {
                let (weights, gradient) = (&mut in_parts[range.clone()], &gradient[range.clone()]);
                optimizer.apply_part(&range, weights, gradient, &mut of_parts, (0.5, &ParameterGroup::default()));
            }
        }
        assert_eq!((in_parts, of_parts), (whole, of_whole), "{kind}");
    }
}

#[test]
fn an_update_in_parts_is_bit_for_bit_that_of_the_whole() {
    for kind in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "FTRL"] {
        let optimizer = Optimizer::new(&json(&format!(r#"{{"type":"{kind}","learningRate":0.5}}"#)));
        let group = ParameterGroup { learning_rate_factor: 0.25, weight_decay: None };
        let stretches = [
            Stretch { range: 0..13, group: ParameterGroup::default() },
            Stretch { range: 13..14, group },
            Stretch { range: 14..40, group: ParameterGroup::default() },
        ];
        let start: Vec<f32> = (0..40).map(|i| (i as f32).cos()).collect();
        let gradient = |t: usize| (0..40).map(|i| gradient(t, i).to_le_bytes()).collect::<Vec<_>>();
        let (mut whole, mut whole_state) = (start.clone(), optimizer.state(40));
        let (mut parts, mut parts_state) = (start, optimizer.state(40));
        for t in 1..=3 {
            let gradient = gradient(t);
            optimizer.apply_by_group(&mut whole, &gradient, &mut whole_state, 0.5, &stretches);
            let mut update = optimizer.begin(&mut parts, &mut parts_state, 0.5, &stretches);
            // Within a group, across all of them, up to the end of one.
            for range in [0..5, 5..20, 20..20, 20..40] {
                update.apply(range.start, &gradient[range]);
            }
        }
        assert_eq!((whole, whole_state), (parts, parts_state), "{kind}");
    }
}

#[test]
fn groups_that_cannot_work_are_refused_with_the_tensor() {
    let tensor = |learning_rate_factor, weight_decay| ParameterGroup { learning_rate_factor, weight_decay };
    for (optimizer, tensor, want) in [
        ("{}", tensor(0.5, Some(0.1)), None),
        ("{}", tensor(-1.0, None), Some("of w has a learning-rate factor of -1")),
        ("{}", tensor(f64::NAN, None), Some("of w has a learning-rate factor of NaN")),
        (
            "{}",
            tensor(1.0, Some(f64::INFINITY)),
            Some("of w has a learning-rate factor of 1 and a weight decay of inf"),
        ),
        (r#"{"type":"FTRL"}"#, tensor(2.0, Some(0.0)), None),
        (r#"{"type":"FTRL"}"#, tensor(1.0, Some(0.1)), Some("FTRL has no weight decay")),
    ] {
        let checked = Optimizer::new(&json(optimizer)).check("w", &tensor).err();
        assert!(
            want.map_or(checked.is_none(), |want| checked.as_ref().is_some_and(|text| text.contains(want))),
            "{checked:?}"
        );
    }
}
