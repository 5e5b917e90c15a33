"""A job's metrics as one run of Weights & Biases: `run = psjobs.wandb.init(job, project="digits")`."""

from __future__ import annotations

import os
from typing import Any

import wandb

import psjobs

# The id that all jobs have that are started by hand without one.
_BY_HAND = "manual"


def init(job: psjobs.Job, **settings: Any) -> Any:
    """Begins the run of the job by `wandb.init` with these settings, or goes on with it, and logs to it what `job.report` gets.

    Call it once. The run has the job's id, so that a process that is started again finds it. Trainer 0 keeps it;
    in the others the run that is returned does nothing. A point's step is that of the job. A metric keeps the first value of a
    step: steps that are made again, because the servers went back to a checkpoint, are not logged again. A script that is alone
    gets a run of its own.

    Raises InputError if the job was started by hand and has no id, and what `wandb.init` raises.
    """
    if job.trainer != 0:
        return wandb.init(mode="disabled")
    if not job.alone:
        uid = os.environ["PSJOB_UID"]
        if uid == _BY_HAND and "id" not in settings:
            text = "this job was started by hand and has no id by which its run of Weights & Biases is found"
            raise psjobs.InputError(f"{text}; give one to psjobs.wandb.init, as id=")
        settings = {"id": uid, "name": os.environ["PSJOB_NAME"], "resume": "allow", **settings}
    run = wandb.init(**settings)
    # Steps below this one are there: of a process before, or of this one.
    first = run.starting_step
    last: dict[str, int] = {}

    def log(step: int, values: dict[str, float]) -> None:
        nonlocal first
        new = {name: value for name, value in values.items() if step >= first and last.get(name, -1) < step}
        if new:
            first = step
            last.update(dict.fromkeys(new, step))
            run.log(new, step=step)

    job._log = log
    return run
