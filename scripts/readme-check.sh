#!/usr/bin/env bash
# Runs every command of README.md's sh blocks, in order, and stops at the first that fails.
#
#   scripts/readme-check.sh [--done COMMAND | --nightly COMMAND]...
#
# Not run are the commands that --done names, because the caller has just run them, those that --nightly names, because the
# nightly workflow runs them, and the making of a cluster that is there. A command that watches is stopped when it has
# shown that the job succeeded. With PROFILE=dev the programs of the debug build stand in for those of target/release.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A left=()
while [[ ${1-} == --done || ${1-} == --nightly ]]; do left[$2]=$1; shift 2; done
limit=600 # seconds for a job to succeed

# Cluster and namespace of the README, whatever the user's own are.
if kind get clusters 2>/dev/null | grep -qx psjobs; then kubectl config use-context kind-psjobs >/dev/null; fi
# A job of an earlier run has ended already.
kubectl delete -f examples/mnist.yaml --ignore-not-found --wait >/dev/null 2>&1 || true

# watch COMMAND: shows what it prints until a line says Succeeded.
watch() {
  local line
  coproc shown { exec timeout "$limit" bash -c "$1"; }
  # shellcheck disable=SC2154 # coproc sets it
  local pid=$shown_PID
  while IFS= read -r line <&"${shown[0]}"; do
    echo "$line"
    [[ $line != *Failed* ]] || break
    if [[ $line == *Succeeded* ]]; then kill "$pid"; wait "$pid" 2>/dev/null || true; return 0; fi
  done
  kill "$pid" 2>/dev/null || true
  return 1
}

commands=$(awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside && NF' README.md)
[[ -n $commands ]] || { echo "README.md has no sh block" >&2; exit 1; }
while IFS= read -r command <&3; do
  if [[ -n ${left[$command]-} ]]; then
    echo "\$ $command    # ${left[$command]#--}"
  elif [[ $command == "kind create cluster --name psjobs" ]] && kind get clusters 2>/dev/null | grep -qx psjobs; then
    echo "\$ $command    # there already"
  else
    echo "\$ $command"
    case $command in
      *--watch) watch "$command" ;;
      target/release/*) [[ ${PROFILE-} != dev ]] || command=${command/release/debug}; bash -euo pipefail -c "$command" ;;
      *) bash -euo pipefail -c "$command" ;;
    esac || { echo "README.md: this command failed: $command" >&2; exit 1; }
  fi
done 3<<<"$commands"
echo "README.md: every command works"
