# shellcheck shell=bash
# Sourced by the scripts that build images: `build ARGUMENTS` runs docker build with the base images of the Dockerfiles. An
# image of a base image's name that was made on this machine, and never pulled, stands in for the one of the Dockerfiles'
# digest once `stand_ins` was called.

# Arguments for docker that name the base images which stand in for those of the Dockerfiles.
bases=()
stand_ins() {
  local name tag digests
  while read -r name tag; do
    digests=$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$tag" 2>/dev/null) || continue
    ! grep -q "^${tag%:*}@" <<<"$digests" || continue
    echo "images: $tag was made on this machine and stands in for the one of the Dockerfiles' digest" >&2
    bases+=(--build-arg "$name=$tag")
  done < <(sed -n 's/^ARG \([A-Z]*_IMAGE\)=\(.*\)@sha256:.*/\1 \2/p' Dockerfile.worker)
}

build() { docker build --quiet "${bases[@]}" "$@" . >/dev/null; }
