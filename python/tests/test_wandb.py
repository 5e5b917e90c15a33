"""The run of Weights & Biases that a job keeps, as its own client writes it without a network."""

import json
import os
import pathlib
import struct
import sys
from collections.abc import Iterator

import pytest
from conftest import DEADLINE, Jobs, succeed

# `make test-python` fetches it into a folder of its own.
PACKAGES = os.environ.get("PSJOBS_WANDB")
if PACKAGES:
    sys.path.append(PACKAGES)
else:
    pytest.importorskip("wandb", reason="PSJOBS_WANDB names no folder with wandb; `make test-python` does")
PATH = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PACKAGES]))

STEPS = 24
BLOCK = 32768

# Trainer 0 ends after some steps, as if it were killed, and is started again.
TRAIN = """
import psjobs.wandb
job = psjobs.join()
model, opt = job.attach(net())
run = psjobs.wandb.init(job, project="digits")
begun = job.step
for x, y in job.batches(data, 4, epochs=2):
    loss(model(x), y).backward()
    opt.step()
    job.report({"third": job.step / 3, "trainer": job.trainer})
    job.report({"third": -1.0})
    if job.trainer == 0 and begun == 0 and job.step == 10:
        run.finish()
        os._exit(9)
print("BEGUN", begun, "DISABLED", run.disabled)
run.finish()
"""


def records(file: pathlib.Path) -> Iterator[bytes]:
    """The records of a file of W&B: LevelDB's log, behind 7 bytes."""
    data, offset, record = file.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if BLOCK - offset % BLOCK < 7:
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def points(file: pathlib.Path) -> Iterator[tuple[str, int, float]]:
    """Metric, step and value of each point."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records(file):
        history = Record.FromString(data).history
        for item in history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                yield name, history.step.num, json.loads(item.value_json)


def test_a_job_is_one_run_with_every_point_once_although_its_trainer_is_started_again(
    jobs: Jobs, tmp_path: pathlib.Path
) -> None:
    sync = {"mode": "Sync"}
    job = jobs.start("--consistency", "sync", "--job-id", "u-1", trainers=2, consistency=sync)
    script = str(job.write(TRAIN))
    more = {"PSJOB_UID": "u-1", "PYTHONPATH": PATH}
    more |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    first, other = (job.start(index, sys.executable, script, **more) for index in range(2))
    said = "".join(first.communicate(timeout=DEADLINE))
    assert first.returncode == 9, said
    again = job.start(0, sys.executable, script, **more)
    for said, begun, disabled in zip(succeed(again, other), (10, 0), (False, True)):
        assert f"BEGUN {begun} DISABLED {disabled}" in said, said
    files = sorted(tmp_path.rglob("*.wandb"))
    assert [file.name for file in files] == ["run-u-1.wandb"] * 2, "two processes have written one run"
    found = sorted(point for file in files for point in points(file))
    third = [("third", step, step / 3) for step in range(1, STEPS + 1)]
    assert found == third + [("trainer", step, 0.0) for step in range(1, STEPS + 1)]


def test_a_job_without_an_id_says_so(jobs: Jobs) -> None:
    job = jobs.start()
    script = "job = psjobs.join()\nimport psjobs.wandb\npsjobs.wandb.init(job)\n"
    trainer = job.start(0, sys.executable, str(job.write(script)), PYTHONPATH=PATH)
    said = "".join(trainer.communicate(timeout=DEADLINE))
    assert trainer.returncode == 2 and "give one to psjobs.wandb.init, as id=" in said, said
