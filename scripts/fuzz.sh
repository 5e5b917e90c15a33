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
work=$PWD/target/fuzz
programs=$(realpath -m "${CARGO_TARGET_DIR:-target}")/debug/examples

selected=()
for target in "${targets[@]}"; do selected+=(--example "$target"); done
# The crates that take inputs apart are optimised, for more inputs a second, but not for a short run: to compile them takes
# longer then. The whole workspace is selected, for the features of dependencies, and of it only the targets are compiled.
fast=()
if ((seconds >= 20)); then
  for package in api ps fuzz; do fast+=(--config "profile.dev.package.psjobs-$package.opt-level=3"); done
fi
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/fuzz-rustc.sh \
  cargo "${fast[@]}" build --locked --quiet --workspace --features psjobs-fuzz/targets "${selected[@]}"

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
