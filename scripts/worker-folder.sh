#!/usr/bin/env bash
# Lays out the worker image's /opt/psjobs in a folder: the program, libtorch where its run path
# ($ORIGIN/../lib) finds it, MNIST, a text, and the licences and names of what is not ours.
#
#   scripts/worker-folder.sh PROGRAM FOLDER [cpu|cuda]
set -euo pipefail
cd "$(dirname "$0")/.."

program=$1 folder=$2 variant=${3:-cpu}
text=${PSJOB_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/psjobs}/text/text.txt
mnist=${PSJOB_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/psjobs/mnist}

libtorch=$(scripts/libtorch.sh "$variant")
scripts/mnist.sh >&2
# Only lm needs it; it says so where there is none.
scripts/text.sh >&2 || text=

rm -rf "$folder"
mkdir -p "$folder"/{bin,lib,licenses,data/mnist,data/text}
strip --strip-debug -o "$folder/bin/psjobs-worker" "$program"
# Hard links where the cache is on the same disk: half a gigabyte less to write.
cp -al "$libtorch/lib/." "$folder/lib/" 2>/dev/null || cp -a "$libtorch/lib/." "$folder/lib/"
cp -a "$libtorch/licenses/." "$folder/licenses/"
# Which wheels the libraries are from, for the list of components of a release. Of a CPU variant only those with a licence
# here were unpacked.
sed -n '/^[a-z]/ s/ .*//p' scripts/requirements/libtorch.txt | while read -r wheel; do
  package=${wheel%%==*}
  if [[ $variant == cuda || -d $libtorch/licenses/${package//-/_} ]]; then echo "$wheel"; fi
done >"$folder/requirements.txt"
for file in train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte; do
  gzip -nc "$mnist/$file" >"$folder/data/mnist/$file.gz"
done
[[ -z $text ]] || cp "$text" "$folder/data/text/"
