#!/usr/bin/env python3
"""Refuses a member of the workspace that docker does not receive: then no image could be compiled by docker.

    scripts/check-members.py [FOLDER]    by default this repository
"""

import pathlib
import sys
import tomllib

root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
members = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["members"]
sent = {line.removeprefix("!").rstrip("/") for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
missing = [member for member in members if member not in sent]
for member in missing:
    print(f"check-members: .dockerignore has no line !{member}; docker cannot compile the workspace without it")
if missing:
    sys.exit(1)
print(f"check-members: docker receives all {len(members)} members of the workspace")
