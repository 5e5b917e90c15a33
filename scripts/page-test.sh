#!/usr/bin/env bash
# Tests the page of a job in Chromium, with Playwright from npm: a real job of PSJOBS and PSJOBS_WORKER is watched, disturbed,
# and looked up when it is over. Where node 20 or Chromium is missing, it says so and ends well; with PSJOBS_REQUIRE_BROWSER
# set it fails.
#
#   scripts/page-test.sh            SCREENSHOTS=FOLDER takes pictures
set -euo pipefail
cd "$(dirname "$0")/../web/browser"

CHROMIUM=$(../../scripts/browser.sh)
[[ -n $CHROMIUM ]] || exit 0
export CHROMIUM
../../scripts/mnist.sh
node --test page.test.mjs
