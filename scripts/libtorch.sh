#!/usr/bin/env bash
# Prints the folder of a libtorch to build and run with (`include/` and `lib/`), the value for
# LIBTORCH. What it needs and does not have it takes from PyTorch's wheels, once.
#
#   scripts/libtorch.sh        $LIBTORCH if set; else an installed PyTorch; else as `cpu`
#   scripts/libtorch.sh cpu    the CPU libraries alone, about 460 MB, in the user's cache folder
#   scripts/libtorch.sh cuda   the CPU and CUDA libraries, several GB, likewise
#
# A binary built against the CPU libraries uses GPUs too where it finds the CUDA ones.
set -euo pipefail

version=2.11.0
# The wheels by version and SHA-256; of another file pip takes nothing.
requirements=$(realpath "$(dirname "$0")")/requirements/libtorch.txt
# The tags that this version's wheels, and those they name, may have: pip takes no range.
platforms=(manylinux2014 manylinux_2_{17..28})
# What libtorch_cpu.so needs besides on 64-bit ARM.
arm_libraries=('libarm_compute*' 'libnvpl_*' 'libgfortran*' 'libopenblas*')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs

say() { echo "libtorch: $*" >&2; }
fail() { say "$@"; exit 1; }

# version_of FOLDER: its version from its own header, or nothing.
version_of() {
  local header=$1/include/torch/headeronly/version.h
  [[ -f $header ]] || return 0
  awk '$2 ~ /^TORCH_VERSION_(MAJOR|MINOR|PATCH)$/ { v = v sep $3; sep = "." } END { print v }' "$header"
}

# is_usable FOLDER: whether the folder holds libraries and headers of our version.
is_usable() { [[ -e $1/lib/libtorch_cpu.so && $(version_of "$1") == "$version" ]]; }

# installed_pytorch: the folder of an installed PyTorch of our version, or nothing. Does not import
# it: that takes seconds.
installed_pytorch() {
  python3 - "$version" 2>/dev/null <<'PY' || true
import importlib.metadata, importlib.util, os, sys
if importlib.metadata.version("torch").split("+")[0] == sys.argv[1]:
    print(os.path.dirname(importlib.util.find_spec("torch").origin))
PY
}

# download FOLDER PACKAGE...: the wheels of the packages, or of all that the requirements name, for CPython 3.12
# whatever Python this machine has: we take only C++ libraries from them, and one tag is one file to download.
download() {
  local folder=$1 arguments=() platform names
  shift
  for platform in "${platforms[@]}"; do arguments+=(--platform "${platform}_$(uname -m)"); done
  mkdir -p "$folder"
  names=$(IFS='|'; echo "$*")
  grep -E "^(${names:-[a-z].*})==" "$requirements" >"$folder/requirements.txt"
  python3 -m pip download --dest "$folder" --no-cache-dir --disable-pip-version-check --only-binary=:all: --no-deps \
    --python-version 3.12 --implementation cp "${arguments[@]}" --require-hashes -r "$folder/requirements.txt" >&2 ||
    fail "pip could not download ${*:-the wheels}, or a file that it got has not the SHA-256 of $requirements;" \
      "check the network and pip's settings (pip config list), or set LIBTORCH to a folder with libtorch $version," \
      "or install PyTorch $version"
}

# unpack WHEELS FOLDER PATTERN...: what matches a pattern, from all wheels in a folder, each wheel
# deleted when it is unpacked. Libraries go flat into FOLDER/lib, so that they find each other.
unpack() {
  python3 - "$@" <<'PY'
import fnmatch, os, pathlib, shutil, sys, zipfile
wheels, folder, *patterns = sys.argv[1:]
for wheel in pathlib.Path(wheels).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            if member.is_dir() or not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                continue
            path = pathlib.PurePosixPath(name)
            if "licenses" in path.parts:
                target = pathlib.Path(folder, "licenses", wheel.name.split("-")[0], path.name)
            elif ".so" in path.name:
                target = pathlib.Path(folder, "lib", path.name)
            else:
                target = pathlib.Path(folder, path.relative_to("torch"))
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
            os.chmod(target, 0o755 if ".so" in path.name else 0o644)
    wheel.unlink()
PY
}

# unresolved FOLDER: libraries that those in FOLDER/lib need and no package provides.
unresolved() {
  local library
  for library in "$1"/lib/*.so*; do
    LD_LIBRARY_PATH=$1/lib ldd "$library" 2>&1 | awk '/not found/ { print $1 }'
  done | sort -u
}

fetch_cpu() {
  local folder=$1 wheels=$1/wheels needed=() library
  download "$wheels" torch
  unpack "$wheels" "$folder" 'torch/include/*' torch/lib/lib{torch_cpu,c10}.so 'torch/lib/libgomp*' 'torch.libs/*.so*' \
    "${arm_libraries[@]/#/torch/lib/}" '*.dist-info/licenses/*'
  # The wheel that the index serves by default has CUDA, and then its CPU half needs these two.
  for library in $(unresolved "$folder"); do
    case $library in
      libcudart.so.13) needed+=(nvidia-cuda-runtime) ;;
      libcupti.so.13) needed+=(nvidia-cuda-cupti) ;;
      libcudart.so.* | libcupti.so.*) fail "the wheel is for another CUDA than 13 (it needs $library); use another index" ;;
    esac
  done
  if [[ ${#needed[@]} -gt 0 ]]; then
    download "$wheels" "${needed[@]}"
    unpack "$wheels" "$folder" '*/libcudart.so.*' '*/libcupti.so.*' '*.dist-info/licenses/*'
  fi
  # All of it that is not CUDA is in this one: linking to it pulls in nothing else.
  ln -s libtorch_cpu.so "$folder/lib/libtorch.so"
}

fetch_cuda() {
  local folder=$1 wheels=$1/wheels
  download "$wheels"
  unpack "$wheels" "$folder" 'torch/include/*' 'torch/lib/*.so*' 'torch.libs/*.so*' 'nvidia/*.so*' '*.dist-info/licenses/*'
  rm -f "$folder"/lib/libtorch_python.so
  [[ -e $folder/lib/libtorch_cuda.so ]] || fail "the index serves PyTorch $version without CUDA; use another index"
}

# fetched VARIANT: its folder in the cache, filled if need be. The folder appears whole or not at all.
fetched() {
  local variant=$1 folder=$cache/libtorch-$version-$1 work missing
  if is_usable "$folder"; then
    echo "$folder"
    return
  fi
  [[ $(uname -s) == Linux ]] || fail "this machine is not Linux; install PyTorch $version with pip and run this again"
  python3 -m pip --version >/dev/null 2>&1 ||
    fail "needs pip to fetch libtorch; install it (python3-pip), or set LIBTORCH to a folder with libtorch $version"
  mkdir -p "$cache" || fail "cannot create $cache; set XDG_CACHE_HOME to a folder that can be written"
  work=$(mktemp -d "$cache/.libtorch.XXXXXX")
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$work'" EXIT
  chmod 755 "$work"
  say "fetching libtorch $version ($variant) into $folder"
  "fetch_$variant" "$work"
  rm -rf "$work/wheels"
  missing=$(unresolved "$work" | grep -v '^libcuda\.so\.1$' | paste -sd ' ' || true)
  [[ -z $missing || $variant == cuda ]] || fail "the libraries need $missing, which this machine does not have"
  is_usable "$work" || fail "the wheels hold no libtorch $version but '$(version_of "$work")'"
  # Another run may have been faster; its folder is as good.
  mv -T "$work" "$folder" 2>/dev/null || is_usable "$folder" || fail "$folder is in the way and not usable; delete it"
  say "$(du -sh "$folder/lib" | cut -f1) of libraries are in $folder/lib"
  echo "$folder"
}

case ${1-} in
  '')
    pytorch=$(installed_pytorch)
    if [[ -n ${LIBTORCH-} ]]; then
      is_usable "$LIBTORCH" || fail "LIBTORCH=$LIBTORCH has no lib/libtorch_cpu.so, or its headers are not of version" \
        "$version but '$(version_of "$LIBTORCH")'; correct it, or unset it to have the right one fetched"
      echo "$LIBTORCH"
    elif [[ -n $pytorch ]] && is_usable "$pytorch"; then
      echo "$pytorch"
    else
      fetched cpu
    fi
    ;;
  cpu | cuda) fetched "$1" ;;
  *) fail "usage: scripts/libtorch.sh [cpu|cuda]" ;;
esac
