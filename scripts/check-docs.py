#!/usr/bin/env python3
"""Checks the documents against the repository: every path in backticks and every link names something that exists,
and every snippet marked with <!-- in FILE --> is in that file word for word, so that what is compiled is what is shown;
every snippet of Rust is marked. Without arguments it also checks how the comments of the Rust sources begin.

    scripts/check-docs.py [FILE...]    by default README.md, CONTRIBUTING.md, SECURITY.md, docs/ and the chart's README

A path is what begins with a folder of the repository (`ps/src/wire`), or a file name with one in front of it
(`server/mod.rs`), which must be the end of one path at least. The YAML of documents is checked by `make test`
(cli/tests/documents.rs).
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A doc comment says what a thing is or does; kubectl explain shows those of api/, which may ask.
OPENINGS = re.compile(r"\s*//[/!] (Of|What|Who|Whether|Those|The same)\b")
DOC_COMMENT = re.compile(r"\s*//[/!]")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "charts/psjobs/README.md", "examples/*.md"]
# What commands of the documents write, and so is in no commit.
WRITTEN = {"target", "checkpoints"}
PATH = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)+/?|[A-Za-z0-9_.-]+/")
SUFFIXES = {".rs", ".proto", ".py", ".sh", ".toml", ".yaml", ".yml", ".md", ".txt", ".svg", ".png"}


def tracked():
    """All files of the repository that git knows or would add, and all their folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    files = {file for file in files if file and (ROOT / file).exists()}
    return files | {str(folder) for file in files for folder in pathlib.PurePath(file).parents if str(folder) != "."}


def anchors(text):
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(text):
    """The document with its fenced blocks blanked, so that line numbers stay."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.M | re.S)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def paths(text, known):
    """Paths in backticks that do not exist."""
    roots = {path.split("/")[0] for path in known if "/" in path}
    for match in re.finditer(r"`([^`\n]+)`", text):
        name = match.group(1)
        if not PATH.fullmatch(name):
            continue
        path = name.rstrip("/")
        first = path.split("/")[0]
        if first in WRITTEN:
            continue
        # A Rust module may be named without its suffix.
        if first in roots and (path in known or path + ".rs" in known):
            continue
        is_file = pathlib.PurePath(path).suffix in SUFFIXES
        if is_file and any(file.endswith("/" + path) for file in known):
            continue
        if first in roots or is_file:
            yield match.start(), f"`{name}` does not exist"


def links(document, text, known):
    """Links to files or headings that do not exist."""
    for match in re.finditer(r"\]\(([^)\s]+)\)", text):
        target = match.group(1)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if name and not (file.is_relative_to(ROOT) and str(file.relative_to(ROOT)) in known):
            yield match.start(), f"the link {target} leads to no file of the repository"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield match.start(), f"the link {target} leads to no heading"


def dedent(text):
    """The text without the indentation of its lines, so that a snippet may be the inside of a function."""
    return re.sub(r"^[ \t]+", "", text, flags=re.M)


def snippets(text):
    """Marked snippets that are not in their file."""
    for match in re.finditer(r"^<!-- in (\S+) -->\n```\w*\n(.*?)^```", text, flags=re.M | re.S):
        file = ROOT / match.group(1)
        if not file.is_file():
            yield match.start(), f"{match.group(1)} does not exist"
        elif dedent(match.group(2)) not in dedent(file.read_text()):
            yield match.start(), f"this snippet is not in {match.group(1)} word for word"
    for match in re.finditer(r"^(.*)\n```rust$", text, flags=re.M):
        if not re.fullmatch(r"<!-- in \S+ -->", match.group(1)):
            yield match.start(), "a snippet of Rust needs <!-- in FILE --> above it, the file that is compiled"


def openings(text):
    """First lines of doc comments that neither say what a thing is nor what it does."""
    before = ""
    for number, line in enumerate(text.split("\n"), 1):
        first = not DOC_COMMENT.match(before) or before.strip() in ("///", "//!")
        if first and (match := OPENINGS.match(line)):
            yield number, f"a comment begins with {match.group(1)}; say what the thing is or does"
        before = line


def main(arguments):
    known = tracked()
    documents = [ROOT / name for name in arguments] or sorted(
        document for pattern in DOCUMENTS for document in ROOT.glob(pattern)
    )
    faults = []
    for document in documents:
        text = document.read_text()
        plain = prose(text)
        found = [*paths(plain, known), *links(document, plain, known)]
        faults += [(document, line_of(plain, position), fault) for position, fault in found]
        faults += [(document, line_of(text, position), fault) for position, fault in snippets(text)]
    if not arguments:
        for source in sorted(name for name in known if name.endswith(".rs") and not name.startswith("api/src/")):
            faults += [(ROOT / source, line, fault) for line, fault in openings((ROOT / source).read_text())]
    for document, line, fault in faults:
        print(f"{document.relative_to(ROOT)}:{line}: {fault}", file=sys.stderr)
    if faults:
        return 1
    print(f"check-docs: {len(documents)} documents name only what exists")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
