#!/usr/bin/env bash
# Publishes a release in a registry: the images and the chart, each signed and with a signed list of its components.
#
#   scripts/release.sh REGISTRY [TAG]
#
# REGISTRY is a host and a path, such as ghcr.io/psjobs. The images are this machine's psjobs-operator, psjobs-worker and
# psjobs-torch of TAG, by default the version in Cargo.toml; scripts/images.sh and scripts/torch-image.sh build them. The
# published chart names the first two by digest.
#
# With PSJOBS_SIGNING_KEY=FILE, a private key of cosign, nothing but the registry is needed. Without it cosign signs with
# the identity of the person or CI job that runs this, and records that in the public log of Sigstore.
# The lists of components stay in target/sbom. Needs docker, helm, cosign and syft (scripts/release-tools.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

registry=${1:?usage: scripts/release.sh REGISTRY [TAG]}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
tag=${2:-$version}
target=${CARGO_TARGET_DIR:-target}
lists=$target/sbom
plain=() # for helm; docker, cosign and syft see by the name that a registry on this machine has no TLS
case $registry in localhost:* | 127.0.0.1:*) plain=(--plain-http) ;; esac
signing=(--yes)

fail() { echo "release: $*" >&2; exit 1; }

for tool in docker helm cosign syft; do
  command -v "$tool" >/dev/null || fail "$tool is not installed; scripts/release-tools.sh prints a folder with cosign and syft"
done
for file in version appVersion; do
  [[ $(sed -n "s/^$file: //p" charts/psjobs/Chart.yaml) == "$version" ]] ||
    fail "the $file in charts/psjobs/Chart.yaml is not the version in Cargo.toml, $version; make them the same"
done

# sign REFERENCE SOURCE [ARGUMENT...]: signs what the reference with a digest names, and the list of SOURCE's components.
sign() {
  local name=${1%@*} list
  list=$lists/${name##*/}.spdx.json
  syft scan --quiet "${@:2}" --source-name "${name##*/}" --source-version "$version" --output "spdx-json=$list"
  cosign sign "${signing[@]}" "$1"
  cosign attest "${signing[@]}" --type spdxjson --predicate "$list" "$1"
}

mkdir -p "$lists"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ -n ${PSJOBS_SIGNING_KEY-} ]]; then
  # Name no service, so that the signature goes to the registry alone.
  cosign signing-config create --out "$work/services.json"
  cosign trusted-root create --out "$work/trusted.json"
  signing+=(--key "$PSJOBS_SIGNING_KEY" --signing-config "$work/services.json" --trusted-root "$work/trusted.json")
fi

declare -A digests
for image in psjobs-operator psjobs-worker psjobs-torch; do
  reference=$registry/$image
  docker tag "$image:$tag" "$reference:$version" ||
    fail "there is no image $image:$tag; build it with scripts/images.sh or scripts/torch-image.sh"
  docker push --quiet "$reference:$version"
  digests[$image]=$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$reference:$version" |
    sed -n "s|^$reference@||p")
  # The images' Cargo.lock and requirements.txt name what is linked into programs, which a scan cannot see.
  sign "$reference@${digests[$image]}" "registry:$reference@${digests[$image]}" \
    --select-catalogers +rust-cargo-lock-cataloger,+python-package-cataloger
done

cp -r charts/psjobs "$work/"
sed -i -e "s|^  repository: psjobs-operator$|  repository: $registry/psjobs-operator|" \
  -e "s|^  digest: \"\"$|  digest: ${digests[psjobs-operator]}|" \
  -e "s|^  image: \"\"$|  image: $registry/psjobs-worker:$version@${digests[psjobs-worker]}|" "$work/psjobs/values.yaml"
rendered=$(helm template psjobs "$work/psjobs")
for image in psjobs-operator psjobs-worker; do
  grep -q "\"$registry/$image:$version@${digests[$image]}\"" <<<"$rendered" ||
    fail "the chart does not name $image by digest; scripts/release.sh and charts/psjobs/values.yaml do not fit together"
done
helm package --destination "$work" "$work/psjobs" >/dev/null
pushed=$(helm push "${plain[@]}" "$work/psjobs-$version.tgz" "oci://$registry/charts" 2>&1) || fail "helm push: $pushed"
sign "$registry/charts/psjobs@$(sed -n 's/^Digest: //p' <<<"$pushed")" "dir:$work/psjobs"

echo "release: $version is in $registry: psjobs-operator, psjobs-worker, psjobs-torch, charts/psjobs"
