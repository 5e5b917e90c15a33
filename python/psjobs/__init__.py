"""A PyTorch script as a trainer of a job: its parameters live on servers, which update them by its gradients.

Importing this does not import torch; `join` and what it returns do.
"""

import importlib
from typing import TYPE_CHECKING, Any

from psjobs._native import Conflict, Error, InputError, Interrupted, PeerAway
from psjobs.cluster_run import ClusterRun, submit
from psjobs.job import Job, join
from psjobs.local_run import JobFailed, Run, run

if TYPE_CHECKING:
    from psjobs.sparse import Embedding, EmbeddingBag

__all__ = ["ClusterRun", "Conflict", "Embedding", "EmbeddingBag", "Error", "InputError", "Interrupted", "Job", "JobFailed", "PeerAway", "Run", "join", "run", "submit"]


def __getattr__(name: str) -> Any:
    """The modules, which are made with torch, when they are asked for."""
    if name in ("Embedding", "EmbeddingBag"):
        from psjobs import sparse

        return getattr(sparse, name)
    if name == "safetensors":
        return importlib.import_module("psjobs.safetensors")
    raise AttributeError(f"module 'psjobs' has no attribute {name!r}")
