#!/usr/bin/env bash
# Puts a text to train the language model on where psjobs-worker looks for it: text.txt in $PSJOB_DATA/text, or
# in psjobs/text in the user's cache folder. It is the King James Bible, which Debian's package bible-kjv
# prints: 4.1 MB of English, in the public domain. A text that is there is kept.
#
# Sources, in order: PSJOBS_TEXT_FILE (any text of yours) if it is set, and no other then; else the command
# bible; else the Debian packages, unpacked into a temporary folder. Any other text: `train lm --data FILE`.
set -euo pipefail

folder=${PSJOB_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/psjobs}/text
text=$folder/text.txt

say() { echo "text: $*"; }
fail() { echo "text: $*" >&2; exit 1; }

# print BIBLE [FLAG...]: every verse on a line of its own, without its label.
print() { "$@" -f 'gen1:1-rev22:21' | sed -E 's/^[0-9A-Za-z]+:[0-9]+ //'; }

from_packages() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
  say "fetching the Debian packages bible-kjv and bible-kjv-text"
  (cd "$work" && apt-get download --quiet bible-kjv bible-kjv-text >/dev/null) || return 1
  for package in "$work"/*.deb; do dpkg-deb --extract "$package" "$work/unpacked" || return 1; done
  print "$work/unpacked/usr/bin/bible" -p "$work/unpacked/usr/lib" >"$work/text"
}

if [[ -s $text ]]; then
  say "$text is there"
  exit 0
fi
mkdir -p "$folder" || fail "cannot create $folder; set PSJOB_DATA to a folder that can be written"
# In the target folder, so that the file moves into place whole; readable for the user who unpacks.
work=$(mktemp -d "$folder/.fetch.XXXXXX") || fail "cannot write to $folder; set PSJOB_DATA to another folder"
chmod 755 "$work"
trap 'rm -rf "$work"' EXIT

if [[ -n ${PSJOBS_TEXT_FILE:-} ]]; then
  cp "$PSJOBS_TEXT_FILE" "$work/text" || fail "PSJOBS_TEXT_FILE=$PSJOBS_TEXT_FILE cannot be copied"
elif command -v bible >/dev/null; then
  print bible >"$work/text"
else
  from_packages || fail "no source answered; install Debian's package bible-kjv, or run" \
    "PSJOBS_TEXT_FILE=any-text.txt make text"
fi
[[ -s $work/text ]] || fail "the source gave an empty text"
mv "$work/text" "$text"
say "$(wc -w <"$text") words in $text"
