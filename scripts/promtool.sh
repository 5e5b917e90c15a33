#!/usr/bin/env bash
# Prints the path of promtool, which checks queries and alerts: the one on the PATH, else that of Debian's package
# prometheus, which is fetched into the cache once and not installed. Prints nothing where neither is to be had, which is
# an error if PSJOBS_REQUIRE_PROMTOOL is set.
set -euo pipefail
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs/prometheus
if command -v promtool; then exit 0; fi
if [[ ! -x $cache/usr/bin/promtool ]] && command -v apt-get >/dev/null; then
  part=$(mktemp -d)
  trap 'rm -rf "$part"' EXIT
  (cd "$part" && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } >log 2>&1 &&
    dpkg -x prometheus_*.deb unpacked) || cat "$part/log" >&2
  if [[ -x $part/unpacked/usr/bin/promtool ]]; then
    mkdir -p "$(dirname "$cache")"
    rm -rf "$cache"
    mv "$part/unpacked" "$cache"
  fi
fi
if [[ -x $cache/usr/bin/promtool ]]; then
  echo "$cache/usr/bin/promtool"
elif [[ -n ${PSJOBS_REQUIRE_PROMTOOL:-} ]]; then
  echo "promtool: not on the PATH, and there is no package prometheus to fetch; install Prometheus" >&2
  exit 1
fi
