//! How fast the codecs are: GB of f32 a second through encode with error feedback and through
//! decode, on one core, beside a memcpy of the same memory in the same run.
//!
//!     cargo run --release -p psjobs-arithmetic --example codecs

use std::hint::black_box;
use std::time::Instant;

use psjobs_arithmetic::codec::{Codec, Encoder, Feedback};

const BLOCK: usize = 256 * 1024;
const BLOCKS: usize = 64;
const RUNS: usize = 9;

fn main() {
    // Sums of uniform numbers look like gradients: many small values, few large ones.
    let mut state = 1_u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as f32 / u32::MAX as f32 - 0.5
    };
    let gradient: Vec<f32> = (0..BLOCK * BLOCKS).map(|_| (0..4).map(|_| uniform()).sum::<f32>() * 1e-3).collect();
    let mut copy = vec![0.0; gradient.len()];
    let memcpy = rate(|| copy.copy_from_slice(black_box(&gradient)));
    println!("memcpy {memcpy:.1} GB/s, {BLOCKS} blocks of {BLOCK} elements, median of {RUNS}");
    println!("{:8} {:>8} {:>8} {:>8} {:>8} {:>12}", "codec", "encode", "ratio", "decode", "ratio", "bytes/elem");

    for codec in [Codec::F32, Codec::Bf16, Codec::Fp16, Codec::Int8, Codec::OneBit, Codec::TopK] {
        let mut encoder = Encoder::new(codec, 0.01);
        let mut feedback = vec![Feedback::new(BLOCK); BLOCKS];
        let mut payloads = vec![vec![0; encoder.payload_len(BLOCK)]; BLOCKS];
        let encode = rate(|| {
            for ((gradient, feedback), payload) in gradient.chunks(BLOCK).zip(&mut feedback).zip(&mut payloads) {
                feedback.encode(&mut encoder, gradient, payload);
            }
        });
        let decode = rate(|| {
            for (payload, out) in payloads.iter().zip(copy.chunks_mut(BLOCK)) {
                codec.decode(black_box(payload), out).expect("the payload was encoded above");
            }
        });
        let bytes = payloads[0].len() as f64 / BLOCK as f64;
        println!(
            "{:8} {encode:>8.1} {:>8.2} {decode:>8.1} {:>8.2} {bytes:>12.3}",
            codec.to_string(),
            encode / memcpy,
            decode / memcpy
        );
    }
}

/// GB of f32 a second that `pass` goes through: the median of some runs after one to warm up.
fn rate(mut pass: impl FnMut()) -> f64 {
    pass();
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            pass();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    (BLOCK * BLOCKS * 4) as f64 / seconds[RUNS / 2] / 1e9
}
