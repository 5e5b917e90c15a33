use proptest::prelude::*;

use super::*;

const CODECS: [Codec; 6] = [Codec::F32, Codec::Bf16, Codec::Fp16, Codec::Int8, Codec::OneBit, Codec::TopK];

fn encode(encoder: &mut Encoder, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut payload = vec![0; encoder.payload_len(values.len())];
    let mut rest = values.to_vec();
    encoder.encode(&mut rest, &mut payload);
    (payload, rest)
}

fn decode(codec: Codec, payload: &[u8], elements: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; elements];
    codec.decode(payload, &mut out).expect("what was encoded can be decoded");
    out
}

/// Gradients as they are: mostly small, some zero, a few large.
fn gradients() -> impl Strategy<Value = Vec<f32>> {
    let element = prop_oneof![8 => -1e-2..1e-2_f32, 1 => Just(0.0), 1 => -50.0..50.0_f32, 1 => -1e-30..1e-30_f32];
    prop::collection::vec(element, 0..1500)
}

/// Largest error that the codec allows for each element.
fn bounds(codec: Codec, values: &[f32]) -> Vec<f32> {
    let largest = |chunk: &[f32]| chunk.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    match codec {
        Codec::F32 => vec![0.0; values.len()],
        Codec::Bf16 => values.iter().map(|v| v.abs() / 256.0).collect(),
        Codec::Fp16 => values.iter().map(|v| (v.abs() / 2048.0).max(3e-8)).collect(),
        Codec::Int8 => {
            values.chunks(int8::CHUNK).flat_map(|chunk| vec![largest(chunk) / 253.9 + 1e-36; chunk.len()]).collect()
        }
        Codec::OneBit => {
            values.chunks(onebit::CHUNK).flat_map(|chunk| vec![largest(chunk) * 1.001; chunk.len()]).collect()
        }
        Codec::TopK => values.iter().map(|v| v.abs()).collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn errors_stay_within_the_bound_of_the_codec(values in gradients(), density in 0.001..=1.0_f64) {
        for codec in CODECS {
            let (payload, rest) = encode(&mut Encoder::new(codec, density), &values);
            let decoded = decode(codec, &payload, values.len());
            for ((value, decoded), (rest, bound)) in
                values.iter().zip(&decoded).zip(rest.iter().zip(bounds(codec, &values)))
            {
                prop_assert!((value - decoded).abs() <= bound, "{codec}: {value:e} became {decoded:e}");
                prop_assert_eq!(value - decoded, *rest, "{}: the rest is what was not sent", codec);
            }
        }
    }

    #[test]
    fn accumulating_is_decoding_and_adding(values in gradients(), density in 0.001..=1.0_f64) {
        for codec in CODECS {
            let (payload, _) = encode(&mut Encoder::new(codec, density), &values);
            let mut sum: Vec<f32> = (0..values.len()).map(|i| i as f32 * 0.25).collect();
            let want: Vec<f32> = sum.iter().zip(decode(codec, &payload, values.len())).map(|(a, b)| a + b).collect();
            codec.accumulate(&payload, &mut sum).expect("valid");
            prop_assert_eq!(sum, want, "{}", codec);
        }
    }

    #[test]
    fn parts_are_those_of_the_whole(elements in 0..10_000_usize, seed: u32, density in 0.001..=1.0_f64) {
        let hash = |i: u32| i.wrapping_add(seed).wrapping_mul(2_654_435_761) as i32 as f32;
        let values: Vec<f32> = (0..elements as u32).map(|i| hash(i) * 1e-9).collect();
        for codec in CODECS {
            let (payload, _) = encode(&mut Encoder::new(codec, density), &values);
            let mut found = Vec::new();
            let mut take = |start: usize, part: &[f32]| {
                assert_eq!(start, found.len(), "{codec}: parts follow each other");
                found.extend_from_slice(part);
            };
            codec.decode_in_parts(&payload, elements, &mut Vec::new(), &mut take).expect("valid");
            prop_assert_eq!(found, decode(codec, &payload, elements), "{}", codec);
            let longer = [&payload[..], &[0]].concat();
            let refused = codec.decode_in_parts(&longer, elements, &mut Vec::new(), |_, _| panic!("{codec} decodes it"));
            prop_assert!(refused.is_err(), "{}", codec);
        }
    }

    #[test]
    fn feedback_in_one_pass_is_bit_for_bit_that_in_two(steps in prop::collection::vec(gradients(), 1..4)) {
        let elements = steps.iter().map(Vec::len).min().unwrap_or(0);
        for codec in CODECS {
            let mut encoder = Encoder::new(codec, 0.1);
            let (mut feedback, mut sum) = (Feedback::new(elements), vec![0.0_f32; elements]);
            let len = encoder.payload_len(elements);
            let (mut one, mut two) = (vec![0; len], vec![0; len]);
            for gradient in &steps {
                let gradient = &gradient[..elements];
                feedback.encode(&mut encoder, gradient, &mut one);
                sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
                encoder.encode(&mut sum, &mut two);
                prop_assert_eq!(&one, &two, "{}", codec);
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(feedback.rest()), bits(&sum), "{}", codec);
            }
        }
    }

    #[test]
    fn feedback_loses_nothing_over_many_steps(values in gradients(), density in 0.05..=1.0_f64) {
        for codec in CODECS {
            let mut encoder = Encoder::new(codec, density);
            let mut feedback = Feedback::new(values.len());
            let mut payload = vec![0; encoder.payload_len(values.len())];
            let mut received = vec![0.0; values.len()];
            for _ in 0..10 {
                feedback.encode(&mut encoder, &values, &mut payload);
                codec.accumulate(&payload, &mut received).expect("valid");
            }
            // Cancellation within a chunk sets the rounding error.
            let scale = values.iter().fold(1e-6_f32, |m, v| m.max(v.abs()));
            for ((value, received), rest) in values.iter().zip(&received).zip(feedback.rest()) {
                prop_assert!((value * 10.0 - received - rest).abs() <= scale * 1e-4, "{codec}: {value:e}");
            }
        }
    }

    #[test]
    fn top_k_takes_the_largest(values in gradients(), density in 0.001..=1.0_f64) {
        let (payload, rest) = encode(&mut Encoder::new(Codec::TopK, density), &values);
        let sent = decode(Codec::TopK, &payload, values.len());
        let least = sent.iter().map(|v| v.abs()).filter(|v| *v > 0.0).fold(f32::INFINITY, f32::min);
        let greatest_rest = rest.iter().map(|v| v.abs()).fold(0.0, f32::max);
        prop_assert!(greatest_rest <= least, "{greatest_rest:e} stayed, {least:e} was sent");
        prop_assert_eq!(payload.len() / 8, topk::count(values.len(), density));
    }

    #[test]
    fn garbage_is_refused_or_decoded_and_never_panics(payload: Vec<u8>, elements in 0..600_usize) {
        for codec in CODECS {
            let mut out = vec![7.0; elements];
            if codec.decode(&payload, &mut out).is_err() {
                prop_assert!(out.iter().all(|v| *v == 7.0), "{codec} wrote before it refused");
            }
        }
    }
}

#[test]
fn a_payload_of_another_length_is_refused_with_both_lengths() {
    for (codec, elements, found, expected) in [
        (Codec::F32, 3, 11, "12 bytes, found 11"),
        (Codec::Bf16, 3, 8, "6 bytes, found 8"),
        (Codec::Fp16, 3, 0, "6 bytes, found 0"),
        (Codec::Int8, 257, 257, "265 bytes, found 257"),
        (Codec::OneBit, 513, 72, "144 bytes, found 72"),
        (Codec::TopK, 2, 12, "a multiple of 8 up to 16 bytes, found 12"),
        (Codec::TopK, 2, 24, "a multiple of 8 up to 16 bytes, found 24"),
    ] {
        let error = codec.accumulate(&vec![0; found], &mut vec![0.0; elements]).expect_err("wrong length").to_string();
        assert!(error.contains(expected) && error.contains(&codec.to_string()), "{error}");
    }
}

#[test]
fn top_k_indices_beyond_the_block_or_out_of_order_are_refused() {
    let payload = |indices: [u32; 2]| [indices.map(u32::to_le_bytes).concat(), vec![0; 8]].concat();
    for (indices, expected) in [
        ([1, 4], "entry 1 has index 4, expected one from 2 to 3"),
        ([2, 2], "entry 1 has index 2, expected one from 3 to 3"),
        ([3, 0], "entry 1 has index 0, expected one from 4 to 3"),
        ([u32::MAX, 0], "entry 0 has index 4294967295"),
    ] {
        let mut out = [5.0; 4];
        let error = Codec::TopK.decode(&payload(indices), &mut out).expect_err("bad index").to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(out, [5.0; 4]);
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_seen_by_the_receiver_and_forgotten_by_the_sender() {
    for codec in CODECS {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 600];
            values[70] = bad;
            let (payload, rest) = encode(&mut Encoder::new(codec, 0.01), &values);
            let decoded = decode(codec, &payload, values.len());
            assert!(decoded.iter().any(|v| !v.is_finite()), "{codec} hides {bad}");
            assert!(rest.iter().all(|v| v.is_finite()), "{codec} keeps {bad}");
        }
    }
}

#[test]
fn halves_show_what_is_not_finite() {
    for codec in [Codec::Bf16, Codec::Fp16] {
        for half in 0..=u16::MAX {
            let payload = half.to_le_bytes();
            assert_eq!(codec.finite(&payload), Some(decode(codec, &payload, 1)[0].is_finite()), "{codec} {half:#x}");
        }
    }
}

#[test]
fn int8_shows_what_is_not_finite() {
    let large = f32::MAX / 100.0;
    let scales =
        [0.0, 1.0, -1.0, large, -large, f32::MAX / 128.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for scale in scales {
        for byte in [0, 1, 99, 101, 127, -127, -128_i8] {
            // The second chunk is the last and short.
            let mut payload = vec![0; int8::payload_len(int8::CHUNK + 2)];
            let at = int8::CHUNK + 4;
            payload[at..at + 4].copy_from_slice(&scale.to_le_bytes());
            payload[at + 5] = byte as u8;
            let want = decode(Codec::Int8, &payload, int8::CHUNK + 2).iter().all(|value| value.is_finite());
            assert_eq!(Codec::Int8.finite(&payload), Some(want), "{byte} times {scale:e}");
        }
    }
}

#[test]
fn a_large_block_gives_top_k_exactly_its_share() {
    let values: Vec<f32> =
        (0..262_144_u32).map(|i| ((i.wrapping_mul(2_654_435_761)) as f32 / 4e9 - 0.5).powi(5)).collect();
    let mut sorted: Vec<f32> = values.iter().map(|v| v.abs()).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let (payload, _) = encode(&mut Encoder::new(Codec::TopK, 0.001), &values);
    let mut sent: Vec<f32> =
        decode(Codec::TopK, &payload, values.len()).into_iter().map(f32::abs).filter(|v| *v > 0.0).collect();
    sent.sort_by(|a, b| b.total_cmp(a));
    assert_eq!(sent, sorted[..263]);
}
