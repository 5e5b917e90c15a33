#!/usr/bin/env bash
# Fails if the subject of a commit since the rule began is longer than 72 characters. A clone without the history says
# that nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/.."

base=2894282d207f3cd01a40f7d47da8eec4842d3778 # the last commit before the rule
limit=72

if ! git merge-base --is-ancestor "$base" HEAD 2>/dev/null; then
  echo "check-commits: not checked, ${base:0:7} is not in this clone's history"
  exit 0
fi
long=$(git log --no-merges --format='%h %s' "$base..HEAD" | awk -v limit="$limit" '
  { subject = substr($0, index($0, " ") + 1) }
  length(subject) > limit { print "  " length(subject) " characters: " $0 }')
if [[ -n $long ]]; then
  echo "check-commits: subjects longer than $limit characters:" >&2
  echo "$long" >&2
  exit 1
fi
