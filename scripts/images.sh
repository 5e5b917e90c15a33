#!/usr/bin/env bash
# Builds both images and prints their sizes. The programs are compiled here, beside everything else
# that cargo built, and copied; where this machine's C library is newer than the images', they are
# compiled by docker instead.
#
#   scripts/images.sh [cpu|cuda] [docker]
#
# With `docker` they are compiled by docker in any case, from the base images that the Dockerfiles name by digest, as
# a release is. Without it, an image of a base image's name that was made on this machine, and never pulled, stands in
# for the one of that digest: so images can be built where no registry is reached. PROFILE=dev copies the programs that
# cargo built for the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

variant=${1:-cpu} compiler=${2:-}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
target=${CARGO_TARGET_DIR:-target}
profile=${PROFILE:-release}
built=$target/${profile/#dev/debug}
image_glibc=2.36 # of debian:bookworm-slim
worker=psjobs-worker:$version operator=psjobs-operator:$version
[[ $variant == cpu ]] || worker+=-$variant

. scripts/base-images.sh
[[ $compiler == docker ]] || stand_ins
own_glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
if [[ $compiler != docker && -n $own_glibc && $(printf '%s\n' "$own_glibc" "$image_glibc" | sort -V | head -1) == "$own_glibc" ]]; then
  LIBTORCH=$(scripts/libtorch.sh cpu) make --no-print-directory build
  scripts/worker-folder.sh "$built/psjobs-worker" "$target/image/worker" "$variant"
  mkdir -p "$target/image/operator/bin"
  for program in psjobs-operator psjobs-web; do
    strip --strip-debug -o "$target/image/operator/bin/$program" "$built/$program"
  done
  build -f Dockerfile.worker -t "$worker" --build-arg BINARIES=prebuilt --build-context prebuilt="$target/image/worker"
  build -f Dockerfile.operator -t "$operator" --build-arg BINARIES=prebuilt --build-context prebuilt="$target/image/operator"
else
  [[ $compiler == docker ]] ||
    echo "images: compiling inside docker, as this machine's C library ($own_glibc) is newer than the images' ($image_glibc)"
  build -f Dockerfile.worker -t "$worker" --build-arg LIBTORCH_VARIANT="$variant"
  build -f Dockerfile.operator -t "$operator"
fi
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -Fw -e "$worker" -e "$operator"
