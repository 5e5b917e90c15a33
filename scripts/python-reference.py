#!/usr/bin/env python3
"""Prints the reference of the Python package, docs/python-reference.md, from the docstrings of its public names.

    scripts/python-reference.py [PACKAGE]
"""

import ast
import pathlib
import re
import sys

PACKAGE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "python/psjobs")
# Module, name, and the heading that it comes under.
PUBLIC = [
    ("Trainers", "job", "join"),
    ("Trainers", "job", "Job"),
    ("Trainers", "optimizers", "ServerOptimizer"),
    ("Embeddings", "sparse", "Embedding"),
    ("Embeddings", "sparse", "EmbeddingBag"),
    ("Jobs on this machine", "local_run", "run"),
    ("Jobs on this machine", "local_run", "Run"),
    ("Jobs on a cluster", "cluster_run", "submit"),
    ("Jobs on a cluster", "cluster_run", "ClusterRun"),
    ("Models as files", "safetensors", "read"),
    ("Models as files", "safetensors", "write"),
    ("Frameworks", "huggingface", "Trainer"),
    ("Frameworks", "lightning", "Strategy"),
    ("Frameworks", "wandb", "init"),
]
ERRORS = {
    "Error": "The servers or the environment do not let the trainer go on. The base of all others; a `RuntimeError`.",
    "InputError": "The model, the data set, an argument or the environment is wrong, and would be again: the process ends with exit "
    "code 2.",
    "PeerAway": "A server stays away, or went back: the process ends with exit code 75, and is started again.",
    "Conflict": "This process was replaced, or another one has a server's place. Where somebody starts it again, as under the operator "
    "and `psjobs.run`, the process ends with exit code 75.",
    "Interrupted": "A wait was given up because the process is asked to end.",
    "JobFailed": "A job that `run` or `submit` started has failed.",
}


def main() -> None:
    """Prints the page."""
    print("# Reference of the Python package\n")
    print("Every public name of `psjobs`; [the guide](python.md) says what they are for. Shapes are those of the script's own")
    print("tensors. `make generate` writes this page from the docstrings.")
    heading = ""
    for under, module, name in PUBLIC:
        if under != heading:
            print(f"\n## {under}")
            heading = under
        prefix = f"psjobs.{module}." if module in ("huggingface", "lightning", "optimizers", "safetensors", "wandb") else "psjobs."
        tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
        node = next(n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
        print(f"\n### {prefix}{name}\n")
        if isinstance(node, ast.FunctionDef):
            function(node, name)
        else:
            described(node)
    print("\n## Errors\n")
    print("| class | meaning |\n|---|---|")
    for name, meaning in ERRORS.items():
        print(f"| `psjobs.{name}` | {meaning} |")


def described(node: ast.ClassDef) -> None:
    """A class with its public attributes and methods."""
    print(text(node))
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_") or ast.get_docstring(member) is None:
            continue
        decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
        if "property" in decorators:
            result = f": {ast.unparse(member.returns)}" if member.returns else ""
            print(f"\n**`{member.name}{result}`**\n\n{text(member)}")
        elif "overload" not in decorators:
            print()
            function(member, member.name)


def function(node: ast.FunctionDef, name: str) -> None:
    """A function with its signature."""
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{name}({arguments}){result}"
    if len(signature) > 100:
        parts = re.split(r", (?![^\[]*\])", arguments)
        signature = f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"
    print(f"```python\n{signature}\n```\n\n{text(node)}")


def text(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring, without its indentation."""
    return (ast.get_docstring(node) or "").strip()


main()
