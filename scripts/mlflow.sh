#!/usr/bin/env bash
# Prints a folder with MLflow and its tracking server, for PYTHONPATH of the Python that is named: the one in the user's cache
# folder, filled once with pip.
#
#     scripts/mlflow.sh PYTHON
#
# The tests of jobs that keep a run of MLflow need it (`make test-python`); nothing else does.
set -euo pipefail

python=${1:?name a Python, as scripts/python.sh prints it}
# By version and SHA-256; of another file pip takes nothing.
requirements=$(realpath "$(dirname "$0")")/requirements/mlflow.txt
version=$(sed -n "s/^mlflow==\([^ ]*\).*/\1/p" "$requirements")
tag=$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs
folder=$cache/mlflow-$version-$(sha256sum "$requirements" | cut -c1-8)-$tag

say() { echo "mlflow: $*" >&2; }

if [[ ! -e $folder/complete ]]; then
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/.mlflow.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  say "fetching mlflow $version into $folder"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$work" --only-binary=:all: --no-deps \
    --require-hashes -r "$requirements" >&2 || {
    say "pip could not install mlflow $version for $tag, or a file that it got has not the SHA-256 of $requirements;" \
      "check the network and pip's settings (pip config list); Python 3.11 to 3.14 have wheels"
    exit 1
  }
  touch "$work/complete"
  # Another run may have been faster; its folder is as good.
  mv -T "$work" "$folder" 2>/dev/null || [[ -e $folder/complete ]]
fi
echo "$folder"
