#!/usr/bin/env bash
# Prints a folder with versitygw, gcs and azurite-blob, which play S3, Google Cloud Storage and Azure Blob Storage in tests: the one
# in the user's cache folder, filled once. The first two are compiled with Go, in some minutes: Go checks each module against the
# public checksum database, and versitygw's own must have the checksum below, too. gcs is fake-gcs-server behind the program in
# objectstore/tests/gcs. Azurite comes from npm, as its lock file says. A program whose
# language is missing is left out, which is an error if PSJOBS_REQUIRE_OBJECT_STORES is set.
set -euo pipefail

module=github.com/versity/versitygw version=v1.8.0 sum=h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc=
azurite=$(cd "$(dirname "$0")/../objectstore/tests/azurite" && pwd)
gcs=$(cd "$azurite/../gcs" && pwd)
contents=$(cat "$azurite/package-lock.json" "$gcs"/main.go "$gcs"/go.* | cksum | cut -d' ' -f1)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs/object-stores-$version-$contents

fail() { echo "object-stores: $*" >&2; exit 1; }
missing() { [[ -z ${PSJOBS_REQUIRE_OBJECT_STORES:-} ]] || fail "$1 is not installed, and $2 needs it"; }

# Go's own archive puts it there.
command -v go >/dev/null || PATH=$PATH:/usr/local/go/bin

mkdir -p "$folder"
# A program appears as a whole or not at all.
work=$(mktemp -d "$folder/.XXXXXX")
trap 'rm -rf "$work"' EXIT

if [[ ! -x $folder/versitygw ]]; then
  if command -v go >/dev/null; then
    [[ $(go env GOSUMDB) != off ]] || fail "GOSUMDB is off, so Go checks no module; unset it"
    echo "object-stores: compiling versitygw $version into $folder" >&2
    found=$(cd / && go mod download -json "$module@$version" | sed -n 's/^\t"Sum": "\(.*\)".*/\1/p') ||
      fail "Go cannot download $module $version"
    [[ $found == "$sum" ]] || fail "$module $version has not the checksum $sum but '$found', so it is not used"
    (cd / && GOBIN=$work CGO_ENABLED=0 go install -trimpath -ldflags=-s "$module/cmd/versitygw@$version") ||
      fail "versitygw $version cannot be compiled; go version is $(go env GOVERSION)"
    mv "$work/versitygw" "$folder/"
  else
    missing go versitygw
  fi
fi
if [[ ! -x $folder/gcs ]]; then
  if command -v go >/dev/null; then
    [[ $(go env GOSUMDB) != off ]] || fail "GOSUMDB is off, so Go checks no module; unset it"
    echo "object-stores: compiling fake-gcs-server into $folder" >&2
    (cd "$gcs" && CGO_ENABLED=0 go build -mod=readonly -trimpath -ldflags=-s -o "$work/gcs" .) ||
      fail "fake-gcs-server cannot be compiled; go version is $(go env GOVERSION)"
    mv "$work/gcs" "$folder/"
  else
    missing go fake-gcs-server
  fi
fi
if [[ ! -x $folder/azurite-blob ]]; then
  if command -v npm >/dev/null; then
    echo "object-stores: installing azurite into $folder" >&2
    mkdir "$work/azurite"
    cp "$azurite"/package*.json "$work/azurite/"
    (cd "$work/azurite" && npm ci --silent --no-audit --no-fund) || fail "azurite cannot be installed"
    rm -rf "$folder/azurite"
    mv "$work/azurite" "$folder/"
    ln -sf azurite/node_modules/.bin/azurite-blob "$folder/azurite-blob"
  else
    missing npm azurite
  fi
fi
echo "$folder"
