#!/usr/bin/env bash
# Makes a release into a registry of its own on this machine, verifies it, and checks that it is refused when somebody
# has changed an image or the chart, or signed it with another key. Checks the archives of the plugin of kubectl, too, and that
# krew's manifest does not fit changed ones.
#
#   scripts/release-check.sh [TAG]    the tag of the local images, by default the version in Cargo.toml
#
# The key is a new one each time, so that nothing is written outside this machine. Needs docker, helm and Go, and what
# scripts/plugin.sh has made in target/plugin.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
tag=${1:-$version}
tools=$(scripts/release-tools.sh)
export PATH=$tools:$PATH

say() { echo "release-check: $*"; }
fail() { say "$*" >&2; exit 1; }

plugin=${CARGO_TARGET_DIR:-target}/plugin
scripts/krew.py check "$plugin"

work=$(mktemp -d)
pid=
# shellcheck disable=SC2317 # called by the trap
conclude() {
  [[ -z $pid ]] || kill "$pid"
  # By name: the image itself, which has other names too, stays.
  docker image ls --format '{{.Repository}}:{{.Tag}}' --filter "reference=$registry/*" | xargs --no-run-if-empty docker image rm >/dev/null
  rm -rf "$work"
}

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
registry=localhost:$port/psjobs
trap conclude EXIT
cat >"$work/registry.yml" <<Y
version: 0.1
log: {level: error}
storage: {filesystem: {rootdirectory: $work/registry}, delete: {enabled: true}}
http: {addr: "localhost:$port"}
Y
registry serve "$work/registry.yml" >"$work/registry.log" 2>&1 &
pid=$!
curl --silent --fail --output /dev/null --retry 100 --retry-connrefused --retry-delay 1 "http://localhost:$port/v2/" ||
  fail "the registry does not answer: $(tail -1 "$work/registry.log")"

export COSIGN_PASSWORD=
(cd "$work" && cosign generate-key-pair && mv cosign.key own.key && mv cosign.pub own.pub && cosign generate-key-pair) 2>/dev/null
export PSJOBS_SIGNING_KEY=$work/own.key PSJOBS_PUBLIC_KEY=$work/own.pub

scripts/release.sh "$registry" "$tag"
scripts/release-verify.sh "$registry"

# refused WHAT PATTERN: the release is refused now, with a sentence that has the pattern.
refused() {
  local message
  if message=$(scripts/release-verify.sh "$registry" 2>&1); then fail "accepted although $1"; fi
  grep -q -- "$2" <<<"$message" || fail "$1: the message has no '$2': $message"
  say "refused as it must be, because $1: ${message##*$'\n'}"
}

# manifest NAME REFERENCE: the raw manifest; put NAME TAG TYPE FILE: stores one under a tag.
accept='application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json'
manifest() { curl --silent --fail --header "Accept: $accept" "http://localhost:$port/v2/psjobs/$1/manifests/$2"; }
put() { curl --silent --fail --output /dev/null --request PUT --header "Content-Type: $3" --data-binary "@$4" "http://localhost:$port/v2/psjobs/$1/manifests/$2"; }
# with_change NAME WHAT: stores the manifest of the version with another annotation, checks that it is refused, and restores it.
with_change() {
  local type
  manifest "$1" "$version" >"$work/right.json"
  type=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("mediaType", sys.argv[2]))' \
    "$work/right.json" "${accept%%,*}")
  python3 -c 'import json, sys; m = json.load(open(sys.argv[1])); m["annotations"] = {"by": "a stranger"}; json.dump(m, sys.stdout)' \
    "$work/right.json" >"$work/wrong.json"
  put "$1" "$version" "$type" "$work/wrong.json"
  refused "$2" "$1:$version has no valid signature"
  put "$1" "$version" "$type" "$work/right.json"
}
with_change psjobs-operator "somebody replaced the operator's image under its tag"
with_change psjobs-worker "somebody replaced the worker's image under its tag"
with_change psjobs-torch "somebody replaced the image of PyTorch scripts under its tag"
with_change charts/psjobs "somebody replaced the chart under its tag"

PSJOBS_PUBLIC_KEY=$work/cosign.pub refused "somebody else signed it" "no valid signature"

# blob NAME INDEX: the file of a layer in the registry's storage.
blob() {
  local digest
  digest=$(manifest "$1" "$version" | python3 -c 'import json, sys; print(json.load(sys.stdin)["layers"][0]["digest"][7:])')
  echo "$work/registry/docker/registry/v2/blobs/sha256/${digest:0:2}/$digest/data"
}
file=$(blob charts/psjobs)
cp "$file" "$work/right.tgz"
printf 'x' | dd of="$file" bs=1 seek=100 conv=notrunc status=none
refused "somebody changed the chart's file behind its signed manifest" "the chart cannot be read"
cp "$work/right.tgz" "$file"

scripts/release-verify.sh "$registry" >/dev/null
say "the release as it was made is accepted again"

# no_plugin WHAT PATTERN: krew's manifest does not fit the archives in $work/plugin, with a sentence that has the pattern.
no_plugin() {
  local message
  if message=$(scripts/krew.py check "$work/plugin" 2>&1); then fail "krew's manifest is accepted although $1"; fi
  grep -q -- "$2" <<<"$message" || fail "$1: the message has no '$2': $message"
  say "refused as it must be, because $1: ${message##*$'\n'}"
}
mkdir "$work/plugin"
cp "$plugin"/*.tar.gz "$plugin/psjob.yaml" "$work/plugin/"
archive=$(find "$work/plugin" -name '*.tar.gz' | sort | head -1)
printf 'x' | dd of="$archive" bs=1 seek=100 conv=notrunc status=none
no_plugin "somebody changed an archive" "has not the SHA-256"
mkdir "$work/files"
tar --extract --gzip --file "$plugin/$(basename "$archive")" --directory "$work/files"
tar --create --gzip --file "$archive" --directory "$work/files" kubectl-psjob
scripts/krew.py write "$work/plugin"
no_plugin "an archive has no licence" "lacks the program or the licence"
