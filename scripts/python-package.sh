#!/usr/bin/env bash
# Lays the Python package out to be imported from a folder, as the wheel would: its sources and the native module.
#
#   scripts/python-package.sh MODULE.so FOLDER
set -euo pipefail
module=$1 folder=$2
rm -rf "$folder/psjobs"
mkdir -p "$folder"
cp -R "$(dirname "$0")/../python/psjobs" "$folder/psjobs"
cp "$module" "$folder/psjobs/_native.abi3.so"
