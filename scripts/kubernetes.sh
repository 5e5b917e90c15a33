#!/usr/bin/env bash
# Prints a folder with etcd, kube-apiserver and kube-scheduler, for the PATH of tests that need an API server: the one in
# the user's cache folder, filled once from the projects' own releases. Nothing is fetched where all three are on the
# PATH, in a version with gang scheduling; then it prints nothing.
set -euo pipefail

kubernetes=1.37.1
etcd=3.7.1
programs=(etcd kube-apiserver kube-scheduler)
# What the projects have published as SHA-256 of each file.
declare -A sha256=(
  [kube-apiserver-amd64]=de9b1b43c10143f448408b3aaf15f44fd5248b97a56301417a1fe2f1fc47a691
  [kube-apiserver-arm64]=c3c240bc4a0fbe3ad311ac3d74ca1d19ac411628130ea825049550fd856020d9
  [kube-scheduler-amd64]=8d10dfc64de70b1670cc1ce52701eb6a219c0905a95bdde608edc5432f9eca43
  [kube-scheduler-arm64]=1bfe0c213f015abb08131ee8a02353eb0492dfe19a965b54c5ca1145b6d05e10
  [etcd-amd64]=e8cd3fa8064c98137c5dbd78b76f969417ace84efb83c481041d7a52ffdd8fb9
  [etcd-arm64]=d7e25e08f694b6ed7792fc7b7a891fe2c3f3d3dccfe2f3bfdb1547b0eb75b6da
)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs
folder=$cache/kubernetes-$kubernetes

say() { echo "kubernetes: $*" >&2; }
fail() {
  say "$@"
  exit 1
}

# has_programs: whether the PATH has all programs, of Kubernetes 1.37 or newer.
has_programs() {
  local program minor
  for program in "${programs[@]}"; do command -v "$program" >/dev/null || return 1; done
  minor=$(kube-apiserver --version | sed -n 's/^Kubernetes v1\.\([0-9]*\)\..*/\1/p')
  [[ -n $minor ]] && ((minor >= 37))
}

# fetch PROGRAM URL FILE: fails if the file has another SHA-256 than the program's.
fetch() {
  local sum=${sha256[$1-$arch]}
  curl --fail --silent --show-error --location --retry 3 --retry-all-errors --connect-timeout 20 --output "$3" "$2" ||
    fail "$2 cannot be fetched; check the network, or put ${programs[*]} on the PATH"
  echo "$sum  $3" | sha256sum --check --status ||
    fail "$2 has not the SHA-256 $sum but $(sha256sum <"$3" | cut -d' ' -f1), so it is not used"
}

if has_programs; then exit 0; fi
if [[ ! -e $folder/complete ]]; then
  case $(uname -m) in
    x86_64) arch=amd64 ;;
    aarch64) arch=arm64 ;;
    *) fail "there are no programs for $(uname -m); put ${programs[*]} on the PATH" ;;
  esac
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/.kubernetes.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  say "fetching Kubernetes $kubernetes and etcd $etcd into $folder"
  for program in kube-apiserver kube-scheduler; do
    fetch "$program" "https://dl.k8s.io/release/v$kubernetes/bin/linux/$arch/$program" "$work/$program"
  done
  archive=etcd-v$etcd-linux-$arch.tar.gz
  fetch etcd "https://github.com/etcd-io/etcd/releases/download/v$etcd/$archive" "$work/$archive"
  tar -xzf "$work/$archive" -C "$work" --strip-components 1 "${archive%.tar.gz}/etcd"
  rm "$work/$archive"
  chmod +x "${programs[@]/#/$work/}"
  touch "$work/complete"
  # Another run may have been faster; its folder is as good.
  mv -T "$work" "$folder" 2>/dev/null || [[ -e $folder/complete ]]
fi
echo "$folder"
