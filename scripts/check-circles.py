#!/usr/bin/env python3
"""Fails when files of one crate import each other in a circle.

Reads the `use` declarations and the paths that begin with `crate`, `super` or `self` of every file under a crate's
src folder, tests left out, and joins the files that they name. A module that only re-exports what its own submodules
define does not depend on them. Circles that are meant to stay are in KEPT, each with its reason.
"""

import re
import sys
import tomllib
from pathlib import Path

# The files of a circle, sorted, and why it stays.
KEPT: dict[tuple[str, ...], str] = {}

USE = re.compile(r"(?:^|\n)[ \t]*(pub(?:\([^)]*\))? )?use ([\w:{},\s*]+);")
PATH = re.compile(r"\b(?:crate|super|self)(?:::\w+)+")
TESTS = re.compile(r"#\[cfg\(test\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))? )?mod \w+ \{")


def paths_of(tree):
    """Returns the paths of a `use` tree: `a::{b, c::d}` gives `a::b` and `a::c::d`."""
    tree = tree.strip()
    if "{" not in tree:
        return [tree.split(" as ")[0].strip()]
    start = tree.index("{")
    parts, depth, part = [], 0, ""
    for character in tree[start + 1 : tree.rindex("}")]:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    return [tree[:start] + path for part in [*parts, part] if part.strip() for path in paths_of(part)]


def modules_of(source):
    """Returns each module's path in the crate with its file."""
    modules = {}
    for file in sorted(source.rglob("*.rs")):
        names = file.relative_to(source).with_suffix("").parts
        if any("test" in name for name in names):
            continue
        if names[-1] in ("mod", "lib", "main"):
            names = names[:-1]
        modules[names] = file
    return modules


def target(modules, module, path):
    """Returns the deepest module that a path names, seen from a module, if it is one of this crate."""
    parts = path.split("::")
    if parts[0] == "crate":
        place = []
    elif parts[0] in ("self", "super"):
        place = list(module)
        for part in parts:
            if part == "super" and place:
                place.pop()
    elif (*module, parts[0]) in modules:
        place = list(module)
    else:
        return None
    found = tuple(place) if tuple(place) in modules else None
    for part in (part for part in parts if part not in ("crate", "self", "super")):
        place.append(part)
        if tuple(place) not in modules:
            break
        found = tuple(place)
    return found


def imports_of(modules):
    """Returns for each module those that it imports from."""
    imports = {}
    for module, file in modules.items():
        text = re.sub(r"//.*", "", file.read_text())
        text = TESTS.split(text)[0]
        named = [(path, bool(public)) for public, tree in USE.findall(text) for path in paths_of(re.sub(r"\s+", " ", tree))]
        named += [(path, False) for path in PATH.findall(USE.sub("\n", text))]
        found = set()
        for path, public in named:
            other = target(modules, module, path)
            re_exports = public and other is not None and other[: len(module)] == module
            if other not in (None, module) and not re_exports:
                found.add(other)
        imports[module] = found
    return imports


def circles_of(imports):
    """Returns the strongly connected components of more than one module (Tarjan 1972)."""
    index, low, stack, circles = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            circle = []
            while module not in circle:
                circle.append(stack.pop())
            if len(circle) > 1:
                circles.append(circle)

    for module in imports:
        if module not in index:
            visit(module)
    return circles


def main():
    root = Path(__file__).resolve().parent.parent
    found = 0
    crates = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["members"]
    for crate in crates:
        modules = modules_of(root / crate / "src")
        imports = imports_of(modules)
        for circle in circles_of(imports):
            files = {module: str(modules[module].relative_to(root)) for module in circle}
            if tuple(sorted(files.values())) in KEPT:
                continue
            found += 1
            print("check-circles: these files import each other in a circle; move what they share below them:")
            for module in sorted(circle):
                others = ", ".join(sorted(files[other] for other in imports[module] & set(circle)))
                print(f"  {files[module]} imports from {others}")
    if found:
        sys.exit(1)
    print(f"check-circles: no circle of files in {len(crates)} crates")


if __name__ == "__main__":
    main()
