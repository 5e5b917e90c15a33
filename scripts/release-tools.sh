#!/usr/bin/env bash
# Prints a folder with cosign, syft and a registry, for the PATH of what makes and checks a release: the one in the user's
# cache folder, filled once with Go's modules. Go checks each module against the public checksum database; those of the
# programs must have the checksums below too. Needs Go; compiling takes some minutes.
set -euo pipefail

# program, package, version, checksum of its module
tools='
cosign github.com/sigstore/cosign/v3 cmd/cosign v3.1.3 h1:001JQRI/PJ/5T+g/kJ1KTvKFbb322+fomc+pHDZ/6sg=
syft github.com/anchore/syft cmd/syft v1.57.0 h1:H/UHtf0KbIlD12dXsfklFMjZ2+erj2an3h/jBHoX/zE=
registry github.com/distribution/distribution/v3 cmd/registry v3.1.2 h1:/Bv2YIqqSR00HiO49FT93hovy6r9IlrzwUDsJjCN5qg=
'
folder=${XDG_CACHE_HOME:-$HOME/.cache}/psjobs/release-tools-$(cksum <<<"$tools" | cut -d' ' -f1)

fail() { echo "release-tools: $*" >&2; exit 1; }

mkdir -p "$folder"
while read -r program module package version sum; do
  [[ -n $program && ! -x $folder/$program ]] || continue
  command -v go >/dev/null || fail "go is not installed, and $program is compiled with it"
  [[ $(go env GOSUMDB) != off ]] || fail "GOSUMDB is off, so Go checks no module; unset it"
  echo "release-tools: compiling $program $version into $folder" >&2
  found=$(cd / && go mod download -json "$module@$version" | sed -n 's/^\t"Sum": "\(.*\)".*/\1/p')
  [[ $found == "$sum" ]] || fail "$module $version has not the checksum $sum but '$found', so it is not used"
  # The file appears whole or not at all.
  work=$(mktemp -d "$folder/.XXXXXX")
  (cd / && GOBIN=$work CGO_ENABLED=0 go install -trimpath -ldflags=-s "$module/$package@$version") ||
    fail "$program $version cannot be compiled; go version is $(go env GOVERSION)"
  mv "$work/$program" "$folder/"
  rmdir "$work"
done <<<"$tools"
echo "$folder"
