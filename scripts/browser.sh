#!/usr/bin/env bash
# Makes ready what tests pages in Chromium, Playwright from npm below web/browser/, and prints the path of Chromium or Chrome.
# Where node 20 or Chromium is missing, it says so and prints nothing. With PSJOBS_REQUIRE_BROWSER set it installs Debian's
# Chromium, and fails if something is missing after that.
set -euo pipefail
cd "$(dirname "$0")/../web/browser"

missing() {
  echo "browser: nothing is tested in Chromium: $1" >&2
  [[ -z ${PSJOBS_REQUIRE_BROWSER:-} ]] || exit 1
  exit 0
}
browser() {
  command -v chromium || command -v chromium-browser || command -v google-chrome
}
node -e 'process.exit(process.versions.node.split(".")[0] >= 20 ? 0 : 1)' 2>/dev/null || missing "it needs node 20 or later"
if ! browser >/dev/null && [[ -n ${PSJOBS_REQUIRE_BROWSER:-} ]] && command -v apt-get >/dev/null; then
  sudo=() && [[ $EUID == 0 ]] || sudo=(sudo)
  "${sudo[@]}" apt-get update -qq >&2
  "${sudo[@]}" apt-get install -qq --yes --no-install-recommends chromium >&2
fi
chromium=$(browser) || missing "it needs Chromium or Chrome on the PATH"
# npm writes this file when everything is installed.
[[ node_modules/.package-lock.json -nt package-lock.json ]] || npm ci --silent >&2
echo "$chromium"
