#!/usr/bin/env bash
# Builds the wheel of the Python package into a folder, and checks it in a fresh virtual environment: one for all versions of
# Python, at most 12 MiB, importable where torch is not installed, and able to run what docs/python.md types. Has a target
# folder of its own, so that nothing else is compiled again.
#
#   scripts/wheel.sh FOLDER [release]
#
# The wheel is for systems whose C library is as new as this machine's. With `release` it is for glibc 2.28 and later, as
# torch's own wheels are, and PyPI accepts it: Zig's C compiler, which pip fetches, links it against that version.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 kind=${2-}
python=$(scripts/python.sh)
mkdir -p "$folder"
rm -f "$folder"/*.whl
platform=()
if [[ $kind == release ]]; then
  rm -rf "$folder/zig"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$folder/zig" -r scripts/requirements/zig.txt
  export PATH=$folder/zig/ziglang:$PATH
  platform=(--zig --compatibility manylinux_2_28)
fi
CARGO_TARGET_DIR=$folder/target "$python" -m maturin build --locked --manifest-path python/Cargo.toml --out "$folder" "${platform[@]}"
wheel=$(echo "$folder"/psjobs-*-cp311-abi3-*.whl)
size=$(stat -c %s "$wheel")
((size <= 12 << 20)) || { echo "wheel: $wheel has $size bytes, more than 12 MiB" >&2; exit 1; }
rm -rf "$folder/venv"
"$python" -m venv "$folder/venv"
echo "psjobs @ file://$wheel --hash=sha256:$(sha256sum "$wheel" | cut -d" " -f1)" >"$folder/wheel.txt"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --require-hashes -r "$folder/wheel.txt"
# It brings the programs of a job on this machine.
env -u PSJOBS_WORKER "$folder/venv/bin/psjobs" run --quiet --set runPolicy.serverDrainSeconds=1 -- true >/dev/null
"$folder/venv/bin/python" - "$wheel" "$size" <<'PY'
import pathlib, sys, time
began = time.monotonic()
import psjobs
milliseconds = (time.monotonic() - began) * 1e3
folder = pathlib.Path(psjobs.__file__).parent
assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()
assert "torch" not in sys.modules
print(f"{sys.argv[1]}: {int(sys.argv[2]) / 2**20:.1f} MiB, imported in {milliseconds:.0f} ms")
PY
# With torch, as the page has it: a script alone, and as two trainers on this machine.
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$site" >"$("$folder/venv/bin/python" -c "$site")/torch.pth"
for command in circle.py "submit_circle.py here"; do
  echo "wheel: python examples/pytorch/$command"
  # shellcheck disable=SC2086 # words of a command
  env -u PSJOBS_WORKER -u PSJOBS -u PYTHONPATH "$folder/venv/bin/python" -P examples/pytorch/$command
done
