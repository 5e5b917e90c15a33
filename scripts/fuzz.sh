#!/usr/bin/env bash
# Builds the fuzz targets with coverage and runs each for a while, from the seeds in fuzz/seeds and what earlier runs
# have found (target/fuzz/corpus). Stable Rust is enough: libFuzzer comes with a crate.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]
#
# An input that fails is kept in target/fuzz/failures; the last lines say how to run it again.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-20}
shift || true
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(frame checkpoint manifest)
triple=$(rustc -vV | sed -n 's/^host: //p')
work=$PWD/target/fuzz
# The workspace's own: build scripts and procedural macros, which have no coverage, are there already.
target_dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")
programs=$target_dir/$triple/debug

# What cargo-fuzz asks of the compiler, without the sanitizers: there is next to no unsafe code to watch.
coverage=(-Cpasses=sancov-module -Ccodegen-units=1 --cfg=fuzzing)
for argument in level=4 inline-8bit-counters pc-table trace-compares; do
  coverage+=("-Cllvm-args=-sanitizer-coverage-$argument")
done
# The versions that the programs are built with; cargo adds what only the targets need.
cp Cargo.lock fuzz/Cargo.lock
RUSTFLAGS="${coverage[*]}" cargo build --quiet --manifest-path fuzz/Cargo.toml --target "$triple" --target-dir "$target_dir"

for target in "${targets[@]}"; do
  mkdir -p "$work/corpus/$target" "$work/failures"
  seeds=(fuzz/seeds/"$target")
  [[ $target != manifest ]] || seeds+=(examples)
  echo "fuzz: $target for $seconds s"
  log=$work/$target.log
  command=("$programs/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=8192
    -artifact_prefix="$work/failures/$target-" -print_final_stats=1 "$work/corpus/$target" "${seeds[@]}")
  if ! "${command[@]}" >"$log" 2>&1; then
    tail -n 40 "$log"
    failure=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    echo "fuzz: $target fails; again: $programs/$target $failure" >&2
    exit 1
  fi
  sed -n 's/^stat::number_of_executed_units: */  inputs: /p; s/^stat::peak_rss_mb: */  peak memory, MiB: /p' "$log"
  grep -o 'cov: [0-9]*' "$log" | tail -n 1 | sed 's/^/  /'
done
