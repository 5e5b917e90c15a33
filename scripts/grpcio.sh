#!/usr/bin/env bash
# Prints a folder with Python's gRPC, for PYTHONPATH: the one in the user's cache folder, filled once with pip.
# The test of a client in another language needs it (`make test-foreign`); nothing else does.
set -euo pipefail

version=1.85.1
# By version and SHA-256; of another file pip takes nothing.
requirements=$(realpath "$(dirname "$0")")/requirements/grpcio.txt
python=$(python3 -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs
folder=$cache/grpcio-$version-$python

say() { echo "grpcio: $*" >&2; }

if [[ ! -e $folder/complete ]]; then
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/.grpcio.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  say "fetching grpcio $version into $folder"
  python3 -m pip install --quiet --disable-pip-version-check --target "$work" --only-binary=:all: --no-deps \
    --require-hashes -r "$requirements" >&2 || {
    say "pip could not install grpcio $version for $python, or a file that it got has not the SHA-256 of $requirements;" \
      "check the network and pip's settings (pip config list); Python 3.10 to 3.14 have wheels"
    exit 1
  }
  touch "$work/complete"
  # Another run may have been faster; its folder is as good.
  mv -T "$work" "$folder" 2>/dev/null || [[ -e $folder/complete ]]
fi
echo "$folder"
