#!/usr/bin/env python3
"""Refuses what is taken from outside by a name that somebody can give to something else: images without a digest in
Dockerfiles and workflows, Actions without the hash of a commit, tools and Python packages without a version or hash.

    scripts/check-pins.py [FOLDER]    by default this repository
"""

import pathlib
import re
import sys

DIGEST = re.compile(r".+:[^/@]+@sha256:[0-9a-f]{64}")
ACTION = re.compile(r"[\w./-]+@[0-9a-f]{40} +# v[0-9.]+")


def dockerfile(text):
    """Base images that are neither pinned nor a stage."""
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", text, flags=re.M))
    stages = {"scratch"} | set(re.findall(r"^FROM .* AS (\S+)", text, flags=re.M | re.I))
    for match in re.finditer(r"^FROM (?:--\S+ )*(\S+)|--from=(\S+)", text, flags=re.M):
        image = re.sub(r"^\$\{?(\w+)\}?$", lambda name: arguments.get(name[1], name[0]), match[1] or match[2])
        if image not in stages and not DIGEST.fullmatch(image):
            yield match.start(), f"{image} has no digest; write NAME:TAG@sha256:..., which scripts/pin-images.sh finds"


def workflow(text):
    """Actions, images and tools that are not pinned."""
    for match in re.finditer(r"uses: *(.+)$", text, flags=re.M):
        if not match[1].startswith("./") and not ACTION.fullmatch(match[1]):
            yield match.start(), f"{match[1]} is not of the form ACTION@COMMIT # vVERSION"
    for match in re.finditer(r"\b(?:node_)?image: *([^\s{}\[\]]+)$", text, flags=re.M):
        if not DIGEST.fullmatch(match[1]):
            yield match.start(), f"the image {match[1]} has no digest"
    for match in re.finditer(r"\btool: *([^}\n]+)", text):
        for tool in match[1].split(","):
            if "@" not in tool:
                yield match.start(), f"the tool {tool.strip()} has no version; write {tool.strip()}@VERSION"


def script(text):
    """Packages that pip, Go or cargo would take in whatever version there is."""
    text = re.sub(r"\\\n", "  ", text)
    for match in re.finditer(r"^(?! *#).*\bpip3? (?:install|download)\b.*$", text, flags=re.M):
        if "--require-hashes" not in match[0]:
            yield match.start(), "pip takes a package without --require-hashes; list it in scripts/requirements"
    for match in re.finditer(r"^(?! *#).*\b(?:go install|go run) .*$", text, flags=re.M):
        if "@$version" not in match[0]:
            yield match.start(), "go takes a module without the version and checksum of scripts/release-tools.sh"
    for match in re.finditer(r"^(?! *#).*\bcargo install\b.*$", text, flags=re.M):
        if "--locked" not in match[0] or "@" not in match[0]:
            yield match.start(), "cargo install needs a version and --locked"


def main(arguments):
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent)
    kinds = [
        ("Dockerfile.*", [dockerfile]),
        (".github/workflows/*.yml", [workflow, script]),
        ("scripts/*.sh", [script]),
        ("Makefile", [script]),
        (".ci/run", [script]),
    ]
    count, faults = 0, []
    for pattern, checks in kinds:
        for file in sorted(root.glob(pattern)):
            text = file.read_text()
            count += 1
            for check in checks:
                faults += [(file.relative_to(root), text.count("\n", 0, start) + 1, fault) for start, fault in check(text)]
    for file, line, fault in faults:
        print(f"{file}:{line}: {fault}", file=sys.stderr)
    if faults:
        return 1
    print(f"check-pins: {count} files take only what has a digest, a hash or a version")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
