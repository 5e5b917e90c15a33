#!/usr/bin/env bash
# Verifies a published release: the signatures of the images and of the chart, those of their lists of components, and
# that the chart names its two images by digest. Fails at the first that does not hold.
#
#   scripts/release-verify.sh REGISTRY [VERSION]
#
# With PSJOBS_PUBLIC_KEY=FILE the signer is who has the private key of that; else it must be the release workflow of
# PSJOBS_REPOSITORY (github.com/psjobs/psjobs). Needs helm and cosign.
set -euo pipefail
cd "$(dirname "$0")/.."

registry=${1:?usage: scripts/release-verify.sh REGISTRY [VERSION]}
version=${2:-$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)}
repository=${PSJOBS_REPOSITORY:-github.com/psjobs/psjobs}
plain=()
case $registry in localhost:* | 127.0.0.1:*) plain=(--plain-http) ;; esac
if [[ -n ${PSJOBS_PUBLIC_KEY-} ]]; then
  signer=(--key "$PSJOBS_PUBLIC_KEY" --insecure-ignore-tlog)
else
  signer=(--certificate-identity "https://$repository/.github/workflows/release.yml@refs/tags/v$version"
    --certificate-oidc-issuer https://token.actions.githubusercontent.com)
fi

fail() { echo "release-verify: $*" >&2; exit 1; }

# verify REFERENCE: whether it and the list of its components have the signer's signature.
verify() {
  local message
  message=$(cosign verify "${signer[@]}" "$1" 2>&1 >/dev/null) || fail "$1 has no valid signature: ${message##*$'\n'}"
  message=$(cosign verify-attestation "${signer[@]}" --type spdxjson "$1" 2>&1 >/dev/null) ||
    fail "$1 has no valid list of components: ${message##*$'\n'}"
  echo "release-verify: $1 is signed, and so is the list of its components"
}

verify "$registry/charts/psjobs:$version"
verify "$registry/psjobs-torch:$version"
rendered=$(helm template psjobs "${plain[@]}" "oci://$registry/charts/psjobs" --version "$version" 2>&1) ||
  fail "the chart cannot be read: ${rendered##*$'\n'}"
for image in psjobs-operator psjobs-worker; do
  verify "$registry/$image:$version"
  reference=$(grep -o "$registry/$image:$version@sha256:[0-9a-f]*" <<<"$rendered" | head -1) ||
    fail "the chart does not name $image by digest"
  verify "$reference"
done
