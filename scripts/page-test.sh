#!/usr/bin/env bash
# Tests the page of a job in Chromium, with Playwright from npm: a real job of PSJOBS and PSJOBS_WORKER is watched, disturbed,
# and looked up when it is over. Where node 20 or Chromium is missing, it says so and ends well; with CI=true it installs
# Debian's Chromium, and fails.
#
#   scripts/page-test.sh            SCREENSHOTS=FOLDER takes pictures
set -euo pipefail
cd "$(dirname "$0")/../web/browser"

missing() {
  echo "page-test: the page was not tested: $1"
  [[ ${CI-} != true ]] || exit 1
  exit 0
}
browser() {
  command -v chromium || command -v chromium-browser || command -v google-chrome
}
node -e 'process.exit(process.versions.node.split(".")[0] >= 20 ? 0 : 1)' 2>/dev/null || missing "it needs node 20 or later"
if ! browser >/dev/null && [[ ${CI-} == true ]] && command -v apt-get >/dev/null; then
  sudo=() && [[ $EUID == 0 ]] || sudo=(sudo)
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -qq --yes --no-install-recommends chromium >/dev/null
fi
CHROMIUM=$(browser) || missing "it needs Chromium or Chrome on the PATH"
export CHROMIUM
../../scripts/mnist.sh
npm ci --silent
node --test page.test.mjs
