#!/usr/bin/env bash
# Lays the packages of the image psjobs-torch out: torch of the Python that scripts/python.sh prints, what torch needs, and
# the package psjobs of a wheel, or of its sources and a native module that cargo has built. Nothing is fetched that is here
# already.
#
#   scripts/torch-folder.sh WHEEL|MODULE.so FOLDER
set -euo pipefail
package=$1 folder=$2
here=$(dirname "$0")
python=$("$here/python.sh")
rm -rf "$folder"
mkdir -p "$folder"
"$python" - "$folder" <<'PY'
import importlib.metadata as metadata, pathlib, re, shutil, sys
folder = pathlib.Path(sys.argv[1])
wanted, done = ["torch", "numpy"], set()
while wanted:
    name = wanted.pop()
    if name in done:
        continue
    done.add(name)
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue  # Libraries of CUDA, without which torch trains on CPUs.
    for file in package.files or []:
        source = pathlib.Path(package.locate_file(file))
        outside = ".." in file.parts
        # Headers are for extensions in C++, and caches are made again.
        if outside or "include" in file.parts or "__pycache__" in file.parts or not source.exists():
            continue
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    wanted += [re.split(r"[^A-Za-z0-9._-]", r)[0] for r in package.requires or [] if "extra ==" not in r]
# The stand-ins of scripts/python.sh for libraries of CUDA, where there are any.
stubs = pathlib.Path(metadata.distribution("torch").locate_file("nvidia"))
if stubs.exists():
    shutil.copytree(stubs, folder / "nvidia", dirs_exist_ok=True)
PY
if [[ $package == *.whl ]]; then
  "$python" -m zipfile -e "$package" "$folder"
else
  "$here/python-package.sh" "$package" "$folder"
  strip --strip-debug "$folder/psjobs/_native.abi3.so"
fi
