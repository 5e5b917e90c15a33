#!/usr/bin/env bash
# Builds both images and prints their sizes. The programs are compiled here, beside everything else
# that cargo built, and copied; where this machine's C library is newer than the images', they are
# compiled by docker instead.
#
#   scripts/images.sh [cpu|cuda]
set -euo pipefail
cd "$(dirname "$0")/.."

variant=${1:-cpu}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
target=${CARGO_TARGET_DIR:-target}
image_glibc=2.36 # of debian:bookworm-slim
worker=psjobs-worker:$version operator=psjobs-operator:$version
[[ $variant == cpu ]] || worker+=-$variant

build() { docker build --quiet "$@" . >/dev/null; }

own_glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
if [[ -n $own_glibc && $(printf '%s\n' "$own_glibc" "$image_glibc" | sort -V | head -1) == "$own_glibc" ]]; then
  LIBTORCH=$(scripts/libtorch.sh cpu) \
    cargo build --locked --release -p psjobs -p psjobs-bench -p psjobs-workloads -p psjobs-operator
  scripts/worker-folder.sh "$target/release/psjobs-worker" "$target/image/worker" "$variant"
  mkdir -p "$target/image/operator/bin"
  cp "$target/release/psjobs-operator" "$target/image/operator/bin/"
  build -f Dockerfile.worker -t "$worker" --build-arg BINARIES=prebuilt --build-context prebuilt="$target/image/worker"
  build -f Dockerfile.operator -t "$operator" --build-arg BINARIES=prebuilt --build-context prebuilt="$target/image/operator"
else
  echo "images: compiling inside docker, as this machine's C library ($own_glibc) is newer than the images' ($image_glibc)"
  build -f Dockerfile.worker -t "$worker" --build-arg LIBTORCH_VARIANT="$variant"
  build -f Dockerfile.operator -t "$operator"
fi
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -Fw -e "$worker" -e "$operator"
