#!/usr/bin/env bash
# Fails if a dependency has a known advisory or was yanked, by cargo-deny and RustSec's database.
#
#   scripts/advisories.sh
#
# Where cargo-deny or the database cannot be had, nothing is checked and a sentence says so; with
# PSJOBS_REQUIRE_ADVISORIES=1, which the public CI sets, that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

not_checked() {
  echo "advisories: not checked, $*" >&2
  [[ ${PSJOBS_REQUIRE_ADVISORIES-} != 1 ]]
  exit
}

command -v cargo-deny >/dev/null || not_checked "cargo-deny is not installed"
message=$(timeout 300 cargo deny fetch db 2>&1) ||
  not_checked "RustSec's database cannot be fetched (${message##*$'\n'})"
cargo deny --locked check advisories
