#!/usr/bin/env bash
# Builds the image psjobs-torch from torch of the Python that scripts/python.sh prints and the package in a wheel, or its
# sources and a native module that cargo has built, and prints its size. Where that Python is not the image's, pip fetches
# torch inside docker.
#
#   scripts/torch-image.sh WHEEL|MODULE.so
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
folder=${CARGO_TARGET_DIR:-target}/image/torch
minor=$("$(scripts/python.sh)" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
. scripts/base-images.sh
stand_ins
if [[ $minor == 3.11 ]]; then
  scripts/torch-folder.sh "$1" "$folder"
  build -f Dockerfile.torch -t "psjobs-torch:$version" --build-arg PACKAGES=prebuilt --build-context prebuilt="$folder"
else
  echo "torch-image: fetching torch inside docker, as Python here is $minor and 3.11 in the image" >&2
  if [[ $1 == *.whl ]]; then
    wheel=$(dirname "$1")
  else
    wheel=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}/wheel")
    scripts/wheel.sh "$wheel"
  fi
  build -f Dockerfile.torch -t "psjobs-torch:$version" --build-context wheel="$wheel"
fi
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' "psjobs-torch:$version"
