#!/usr/bin/env bash
# Prints a folder with the packages of scripts/requirements/NAME.txt, for PYTHONPATH of the Python that is named, else python3: the
# one in the user's cache folder, filled once with pip.
#
#     scripts/python-packages.sh NAME [PYTHON]
#
# Tests alone need them: `make test-foreign` grpcio, for a client in another language, and `make test-python` mlflow, the tracking
# server, and wandb.
set -euo pipefail

name=${1:?name one of scripts/requirements/}
python=${2:-python3}
# By version and SHA-256; of another file pip takes nothing.
requirements=$(realpath "$(dirname "$0")")/requirements/$name.txt
version=$(sed -n "s/^$name==\([^ ]*\).*/\1/p" "$requirements")
tag=$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs
folder=$cache/$name-$version-$(sha256sum "$requirements" | cut -c1-8)-$tag

say() { echo "$name: $*" >&2; }

if [[ ! -e $folder/complete ]]; then
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/.$name.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  say "fetching $name $version into $folder"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$work" --only-binary=:all: --no-deps \
    --require-hashes -r "$requirements" >&2 || {
    say "pip could not install $name $version for $tag, or a file that it got has not the SHA-256 of $requirements;" \
      "check the network and pip's settings (pip config list); Python 3.11 to 3.14 have wheels"
    exit 1
  }
  touch "$work/complete"
  # Another run may have been faster; its folder is as good.
  mv -T "$work" "$folder" 2>/dev/null || [[ -e $folder/complete ]]
fi
echo "$folder"
