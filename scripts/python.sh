#!/usr/bin/env bash
# Prints a Python with torch, transformers, lightning, tensorboard, nbclient, ipykernel, pytest, pytest-xdist, mypy and maturin,
# for the tests of the package psjobs:
# $PSJOBS_PYTHON if set; else python3 if it has all of them; else that of a virtual environment in the user's cache folder,
# filled once with pip.
#
# Where pip has torch for CUDA only, as on PyPI for Linux on x86-64, the environment takes the wheel without the libraries
# of CUDA, several GB that tests on a CPU do not need: empty libraries of their names stand in, so that torch is loaded.
set -euo pipefail
cd "$(dirname "$0")/.."

requirements=scripts/requirements/python.txt
version=$(sed -n "s/^torch==\([^ ]*\).*/\1/p" "$requirements")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs
modules='import torch, pytest, xdist, mypy, maturin, transformers, lightning, tensorboard, nbclient, ipykernel'

say() { echo "python: $*" >&2; }
fail() { say "$@"; exit 1; }

if [[ -n ${PSJOBS_PYTHON-} ]]; then
  "$PSJOBS_PYTHON" -c "$modules" || fail "PSJOBS_PYTHON=$PSJOBS_PYTHON lacks a module; install $requirements and torch $version"
  echo "$PSJOBS_PYTHON"
  exit
fi
if python3 -c "$modules" 2>/dev/null; then
  command -v python3
  exit
fi

tag=$(python3 -c 'import sys; print("py%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))') ||
  fail "the package needs Python 3.11 or later, and python3 is older; install one, or name one with PSJOBS_PYTHON"
folder=$cache/python-torch-$version-$(sha256sum "$requirements" | cut -c1-8)-$tag

# stand_in PYTHON: libraries with the symbols that torch's libraries look for and no library there has.
stand_in() {
  "$1" - <<'PY'
import importlib.util, pathlib, re, subprocess, tempfile
lib = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
if not (lib / "libtorch_cuda.so").exists():
    raise SystemExit
wanted, had, missing = set(), set(), set()
for library in lib.glob("*.so*"):
    for line in subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout.splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0] in ("U", "w"):
            wanted.add(fields[1].split("@")[0])
        elif len(fields) == 3:
            had.add(fields[2].split("@")[0])
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    missing |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^]]*)\]", needed))
folder = lib.parents[1] / "nvidia" / "cu13" / "lib"
missing = {name for name in missing if not (folder / name).exists()}
symbols = [s for s in wanted - had if re.match(r"(cublas|cudnn|cufft|cuFile|curand|cusolver|cusparse|nccl|nvrtc|nvshmem|cu[A-Z])", s)]
with tempfile.TemporaryDirectory() as work:
    for name in missing:
        # The versions of a library that has none are not checked, but for its own symbols: those lie in another one.
        held = symbols if name.startswith("libnccl") else []
        source = pathlib.Path(work, "stub.s")
        source.write_text("".join(f".globl {s}\n.type {s}, @function\n{s}:\n" for s in held) + " .byte 0\n")
        subprocess.run(["cc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", folder / name, source], check=True)
PY
}

if [[ ! -e $folder/complete ]]; then
  # Two that make it at once would delete each other's files.
  mkdir -p "$cache"
  exec 9>"$folder.lock"
  flock 9
fi
if [[ ! -e $folder/complete ]]; then
  say "making $folder with torch $version; this is done once"
  rm -rf "$folder"
  trap 'rm -rf "$folder"' EXIT
  python3 -m venv "$folder" || fail "python3 makes no virtual environment; install python3-venv, or name one with PSJOBS_PYTHON"
  python=$folder/bin/python
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$requirements" >&2 ||
    fail "pip could not install torch $version; check the network and pip's settings (pip config list)"
  stand_in "$python" || fail "torch's libraries cannot be completed; install a C compiler, or name a Python with PSJOBS_PYTHON"
  "$python" -c "$modules" || fail "torch $version cannot be loaded; name a Python that has it with PSJOBS_PYTHON"
  touch "$folder/complete"
  trap - EXIT
fi
echo "$folder/bin/python"
