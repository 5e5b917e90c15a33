#!/usr/bin/env bash
# Writes the digests which the tags of all pinned images have now in their registries: of the base images in the
# Dockerfiles, and of the cluster's nodes in the workflows. Run it where the registries are reached, look at what changed
# (git diff), and commit that.
#
#   scripts/pin-images.sh
set -euo pipefail
cd "$(dirname "$0")/.."

pattern='[A-Za-z0-9./:_-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}'
files=(Dockerfile.* .github/workflows/*.yml)

grep -ohE "$pattern" "${files[@]}" | sort -u | while read -r pinned; do
  name=${pinned%@*}
  # Of the index over all architectures, where the image has one.
  digest=$(docker buildx imagetools inspect "$name" | sed -n 's/^Digest: *//p') || {
    echo "pin-images: the registry of $name did not answer; nothing more is written" >&2
    exit 1
  }
  echo "$name@$digest"
  sed -i "s|$pinned|$name@$digest|g" "${files[@]}"
done
