#!/usr/bin/env python3
"""The manifest by which krew installs the plugin of kubectl from a release's archives.

    scripts/krew.py write FOLDER    writes FOLDER/psjob.yaml, with the SHA-256 of each archive in FOLDER
    scripts/krew.py check FOLDER    fails if a sum is not that of the archive, or an archive lacks the program or the licence

PSJOBS_REPOSITORY (github.com/psjobs/psjobs) is the repository whose releases have the archives.
"""

import hashlib
import os
import pathlib
import re
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM, LICENCE, MANIFEST = "kubectl-psjob", "LICENSE", "psjob.yaml"
# The numbers of architectures in the header of a program (ELF's e_machine).
MACHINES = {"amd64": 62, "arm64": 183}

HEAD = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: psjob
spec:
  version: v{version}
  homepage: https://{repository}
  shortDescription: Submit, explain and follow training jobs
  description: |
    Works on ParameterServerJobs, which train models with parameter
    servers: submits them, says what they wait for or why they failed
    and what to type next, merges the logs of all their pods, shows
    their progress and curves, and fetches checkpoints and models.
    The cluster needs psjobs.
  platforms:
"""
PLATFORM = """\
  - selector:
      matchLabels:
        os: linux
        arch: {architecture}
    uri: {uri}
    sha256: {sum}
    bin: {program}
    files:
    - from: {program}
      to: .
    - from: {licence}
      to: .
"""


class Fault(Exception):
    """A sentence about what is wrong."""


def version():
    return re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), flags=re.M)[1]


def repository():
    return os.environ.get("PSJOBS_REPOSITORY", "github.com/psjobs/psjobs")


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def manifest(folder):
    """The text of the manifest for the archives in a folder."""
    text = HEAD.format(version=version(), repository=repository())
    archives = [(name, folder / f"{PROGRAM}-{version()}-linux-{name}.tar.gz") for name in MACHINES]
    archives = [(name, archive) for name, archive in archives if archive.exists()]
    if not archives:
        raise Fault(f"there is no archive of version {version()} in {folder}; scripts/plugin.sh makes them")
    for name, archive in archives:
        uri = f"https://{repository()}/releases/download/v{version()}/{archive.name}"
        text += PLATFORM.format(architecture=name, uri=uri, sum=sha256(archive), program=PROGRAM, licence=LICENCE)
    return text


def check(folder):
    """Checks the manifest in a folder and the archives that it names; returns their names."""
    text = (folder / MANIFEST).read_text()
    if f"\n  version: v{version()}\n" not in text:
        raise Fault(f"{MANIFEST} is not of version {version()}")
    entry = r"arch: (\S+)\n    uri: (\S+)\n    sha256: ([0-9a-f]{64})\n    bin: (\S+)\n    files:\n((?:    - from: \S+\n      to: \.\n)+)"
    platforms = re.findall(entry, text)
    if not platforms or len(platforms) != text.count("- selector:"):
        raise Fault(f"{MANIFEST} has a platform without an architecture, an address, a sum, a program or files")
    names = []
    for architecture, uri, expected, program, files in platforms:
        name = uri.rpartition("/")[2]
        if f"/releases/download/v{version()}/" not in uri:
            raise Fault(f"{uri} is not of the release of version {version()}")
        archive = folder / name
        if not archive.exists():
            raise Fault(f"{MANIFEST} names {name}, which is not there")
        if sha256(archive) != expected:
            raise Fault(f"{name} has not the SHA-256 that {MANIFEST} names")
        with tarfile.open(archive) as content:
            members = {member.name: member for member in content}
            wanted = set(re.findall(r"from: (\S+)", files))
            if {program, LICENCE} - wanted or wanted - set(members):
                raise Fault(f"{name} lacks the program or the licence: {MANIFEST} names {sorted(wanted)}, it has {sorted(members)}")
            if not members[program].isfile() or not members[program].mode & 0o111:
                raise Fault(f"{program} in {name} is not a program")
            header = content.extractfile(members[program]).read(20)
            if header[:4] != b"\x7fELF" or int.from_bytes(header[18:20], "little") != MACHINES.get(architecture):
                raise Fault(f"{program} in {name} is not a program for {architecture}")
            if content.extractfile(members[LICENCE]).read() != (ROOT / LICENCE).read_bytes():
                raise Fault(f"{LICENCE} in {name} is not that of this repository")
        names.append(name)
    return names


def main(arguments):
    if len(arguments) != 2 or arguments[0] not in ("write", "check"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[1])
    try:
        if arguments[0] == "write":
            (folder / MANIFEST).write_text(manifest(folder))
        else:
            print(f"krew: {MANIFEST} is right about {', '.join(check(folder))}")
    except (Fault, OSError, tarfile.TarError) as fault:
        print(f"krew: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
