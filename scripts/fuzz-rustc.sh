#!/usr/bin/env bash
# Calls rustc, the first argument, with coverage for libFuzzer. `scripts/fuzz.sh` makes cargo call it for the crates of the
# workspace; dependencies, which have none, are those of every other build.
set -euo pipefail
# What cargo-fuzz asks of the compiler, without the sanitizers: there is next to no unsafe code to watch.
coverage=(-Cpasses=sancov-module -Ccodegen-units=1 --cfg=fuzzing)
for argument in level=4 inline-8bit-counters pc-table trace-compares; do
  coverage+=("-Cllvm-args=-sanitizer-coverage-$argument")
done
# Build scripts run while others are compiled, without libFuzzer. What is not a crate is a question of cargo's.
case " $* " in
  *" --crate-name build_script_"*) ;;
  *" --crate-name ___ "*) ;;
  *) set -- "$@" "${coverage[@]}" ;;
esac
exec "$@"
