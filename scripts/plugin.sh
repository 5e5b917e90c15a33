#!/usr/bin/env bash
# Compiles the plugin of kubectl for releases and packs it, with the licence, into an archive for each architecture, and writes
# the manifest by which krew installs it from them: FOLDER/psjob.yaml.
#
#   scripts/plugin.sh FOLDER [ARCHITECTURE...]    amd64 and arm64, by default both
#
# The programs are for glibc 2.28 and later, as the wheel is: maturin compiles them with Zig's C compiler, which pip fetches. So
# one machine compiles for both architectures; rustup fetches the standard library of the other one. An archive has the same bytes
# each time that it is packed from the same program.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: scripts/plugin.sh FOLDER [ARCHITECTURE...]}
shift
architectures=("$@")
((${#architectures[@]})) || architectures=(amd64 arm64)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)

fail() { echo "plugin: $*" >&2; exit 1; }

declare -A targets=([amd64]=x86_64-unknown-linux-gnu [arm64]=aarch64-unknown-linux-gnu)
for architecture in "${architectures[@]}"; do
  [[ -n ${targets[$architecture]-} ]] || fail "there is no plugin for $architecture; give amd64 or arm64"
done

python=$(scripts/python.sh)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -rf "$folder"/*.tar.gz "$folder/psjob.yaml" "$folder/zig"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$folder/zig" -r scripts/requirements/zig.txt
export PATH=$folder/zig/ziglang:$PATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for architecture in "${architectures[@]}"; do
  target=${targets[$architecture]}
  if command -v rustup >/dev/null; then
    rustup target add "$target" || fail "rustup cannot fetch the standard library of $target"
  fi
  CARGO_TARGET_DIR=$folder/target "$python" -m maturin build --locked --profile release --bindings bin \
    --manifest-path kubectl/Cargo.toml --target "$target" --zig --compatibility manylinux_2_28 --out "$work/$architecture"
  # A wheel is an archive of zip, with the program among its scripts.
  mkdir "$work/$architecture/packed"
  "$python" - "$work/$architecture" <<'PY'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
[wheel] = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as content:
    [name] = [name for name in content.namelist() if name.endswith("/scripts/kubectl-psjob")]
    (folder / "packed/kubectl-psjob").write_bytes(content.read(name))
PY
  chmod 755 "$work/$architecture/packed/kubectl-psjob"
  install -m 644 LICENSE "$work/$architecture/packed/"
  tar --create --directory "$work/$architecture/packed" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 \
    kubectl-psjob LICENSE | gzip --no-name --best >"$folder/kubectl-psjob-$version-linux-$architecture.tar.gz"
done
scripts/krew.py write "$folder"
scripts/krew.py check "$folder"
