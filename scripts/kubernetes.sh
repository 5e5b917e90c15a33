#!/usr/bin/env bash
# Prints a folder with etcd, kube-apiserver and kube-scheduler, for the PATH of tests that need an API server: the one in
# the user's cache folder, filled once from the projects' own releases. Nothing is fetched where all three are on the
# PATH, in a version with gang scheduling; then it prints nothing.
set -euo pipefail

kubernetes=1.37.1
etcd=3.7.3
programs=(etcd kube-apiserver kube-scheduler)
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

# fetch URL FILE
fetch() { curl --fail --silent --show-error --location --retry 3 --output "$2" "$1"; }

# check FILE SUM: fails if the file's SHA-256 is another one.
check() { echo "$2  $1" | sha256sum --check --quiet >&2; }

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
    url=https://dl.k8s.io/release/v$kubernetes/bin/linux/$arch/$program
    fetch "$url" "$work/$program" && fetch "$url.sha256" "$work/sum" ||
      fail "$url cannot be fetched; check the network, or put ${programs[*]} on the PATH"
    check "$work/$program" "$(cat "$work/sum")" || fail "$url is damaged"
  done
  release=https://github.com/etcd-io/etcd/releases/download/v$etcd archive=etcd-v$etcd-linux-$arch.tar.gz
  fetch "$release/$archive" "$work/$archive" && fetch "$release/SHA256SUMS" "$work/sum" ||
    fail "$release/$archive cannot be fetched; check the network, or put ${programs[*]} on the PATH"
  check "$work/$archive" "$(awk -v name="$archive" '$2 == name { print $1 }' "$work/sum")" || fail "$archive is damaged"
  tar -xzf "$work/$archive" -C "$work" --strip-components 1 "${archive%.tar.gz}/etcd"
  rm "$work/sum" "$work/$archive"
  chmod +x "${programs[@]/#/$work/}"
  touch "$work/complete"
  # Another run may have been faster; its folder is as good.
  mv -T "$work" "$folder" 2>/dev/null || [[ -e $folder/complete ]]
fi
echo "$folder"
