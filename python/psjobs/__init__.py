"""A PyTorch script as a trainer of a job: its parameters live on servers, which update them by its gradients.

Importing this does not import torch; `join` and what it returns do.
"""

from psjobs._native import Conflict, Error, InputError, Interrupted, PeerAway
from psjobs.cluster_run import ClusterRun, submit
from psjobs.job import Job, join
from psjobs.local_run import JobFailed, Run, run

__all__ = ["ClusterRun", "Conflict", "Error", "InputError", "Interrupted", "Job", "JobFailed", "PeerAway", "Run", "join", "run", "submit"]
