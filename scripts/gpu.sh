#!/usr/bin/env bash
# Tests and measures everything that uses a GPU, on this machine's, in some five minutes; without a GPU it says so, and that
# is no error. Prints the tests' summary, how each example ends whose trainers or servers compute there, and what servers
# cost a trainer (docs/gpu.md).
#
#   scripts/gpu.sh BUILT [FLAG...]    the folder with psjobs, psjobs-bench, psjobs-worker and lib_native.so; flags are those
#                                     of psjobs bench gpu
#   scripts/gpu.sh --ready            says what is missing; 1 if that is a GPU, 2 if it is a program
#
# python3 must have PyTorch 2.11 with CUDA, whose libtorch the worker takes, and pytest and pytest-xdist.
set -euo pipefail
cd "$(dirname "$0")/.."
# As psjobs run looks (cli/src/run/machine.rs).
has_gpu() {
  compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null || compgen -G '/dev/nvidia[0-9]*' >/dev/null || [[ -e /dev/dxg ]]
}
needs() {
  python3 -c "$1" 2>/dev/null || { echo "gpu: $2" >&2; exit 2; }
}
if ! has_gpu; then
  echo "gpu: this machine has no CUDA device, so nothing was measured"
  [[ ${1:-} != --ready ]] || exit 1
  exit 0
fi
needs 'import torch' "python3 has no torch; install PyTorch 2.11 with CUDA"
needs 'import torch; assert torch.cuda.is_available()' "PyTorch finds no CUDA device; it must be one with CUDA, and the driver of version 580 or later"
needs 'import pytest, xdist' "python3 has no pytest or no pytest-xdist; install both"
[[ ${1:-} != --ready ]] || exit 0
built=$(realpath "${1:?BUILT}")
shift
torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
export LD_LIBRARY_PATH=$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PSJOBS=$built/psjobs PSJOBS_WORKER=$built/psjobs-worker
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
scripts/python-package.sh "$built/lib_native.so" "$site"
export PYTHONPATH=$site

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
echo "== tests"
# Each process of a test loads CUDA anew, which takes longer than the test: many at once.
(cd python && python3 -P -m pytest -q -n auto -p no:cacheprovider tests/test_devices.py tests/test_overlap.py \
  -k "cuda or gpu or pinned") >"$site/tests.txt" 2>&1 || { cat "$site/tests.txt"; exit 1; }
tail -n 1 "$site/tests.txt"
! tail -n 1 "$site/tests.txt" | grep -q skipped || { echo "gpu: tests that need the GPU were skipped" >&2; exit 1; }

# example NAME [SET...]: runs a manifest from standard input; prints what it reached.
example() {
  local name=$1 sets=() set
  shift
  for set in "$@"; do sets+=(--set "$set"); done
  "$PSJOBS" run --json --quiet --log-dir "$site/$name" "${sets[@]}" - >"$site/$name.json" 2>"$site/$name.txt" ||
    { cat "$site/$name.txt" "$site/$name"/*.log >&2; exit 1; }
  python3 - "$name" "$site/$name.json" <<'PY'
import json, sys
found = json.load(open(sys.argv[2]))
metrics = " ".join(f"{name} {value:.4g}" for name, value in found["metrics"].items())
print(f"{sys.argv[1]:>12}  {found['state']} in {found['seconds']:.1f} s, {found['steps_per_second']:.1f} steps/s, {metrics}")
PY
  # Trainers, or the server that has the network, say on what they compute.
  grep -oE "devices?=[^ ]*Cuda[^ ]*" "$site/$name"/*.log | sed "s|^$site/$name/|              |" ||
    { echo "gpu: $name has computed on no GPU" >&2; exit 1; }
}
echo "== examples, with a GPU"
for name in mnist mlp; do example "$name" trainer.gpus=1 <examples/$name.yaml; done
example mnist-gpu <examples/mnist-gpu.yaml
sed 's|limits: {memory: 1Gi}|limits: {memory: 1Gi, nvidia.com/gpu: 1}|' examples/mnist-remote.yaml | example mnist-remote

echo "== what servers cost: steps/s with them over those without"
"$built/psjobs-bench" gpu "$@"
python3 -m psjobs.bench gpu
