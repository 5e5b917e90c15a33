"""The run of MLflow that a job keeps, as a real tracking server returns it."""

import contextlib
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psjobs
import pytest
from conftest import PRELUDE, free_port, program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

KILLS = 20
EPOCHS = 600
STEPS = 6 * EPOCHS
# Kills after which the tracking server goes away and comes back.
AWAY, BACK = 7, 13
DEADLINE = 120
LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]

# A trainer tells its step by a file, and makes the last steps when all kills are over.
TRAIN = """
import pathlib, time
job = psjobs.join()
model, opt = job.attach(net())
here = pathlib.Path(os.environ["HERE"])
odd = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4028234663852886e38, 1 / 3]
latest = time.monotonic() + 600
for x, y in job.batches(data, 8, epochs=EPOCHS):
    value = loss(model(x), y)
    value.backward()
    while job.step >= STEPS - 60 and not (here / "killed").exists() and time.monotonic() < latest:
        time.sleep(0.01)
    time.sleep(float(os.environ["PACE"]))
    before = job.step
    opt.step()
    if job.step == before + 1:
        job.report({"loss": value.item() + job.trainer, "odd": odd[job.step % len(odd)]})
        (here / f"step-{job.trainer}").write_text(str(job.step))
"""


def wait_for(what: str, is_so: Callable[[], Any]) -> Any:
    """Waits until something is so, and returns it."""
    latest = time.monotonic() + DEADLINE
    while not (found := is_so()):
        assert time.monotonic() < latest, f"{what} did not come in {DEADLINE} s"
        time.sleep(0.02)
    return found


# Prints all values of a run's metrics.
READ = """
import json, sys
from mlflow.tracking import MlflowClient

uri, run = sys.argv[1:]
client = MlflowClient(uri)
metrics = client.get_run(run).data.metrics
curves = {key: [(point.step, point.value) for point in client.get_metric_history(run, key)] for key in metrics}
json.dump(curves, sys.stdout)
"""


class Mlflow:
    """A tracking server with its data in a folder."""

    def __init__(self, folder: pathlib.Path, packages: str) -> None:
        self.folder, self.packages = folder, packages
        self.uri = f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", self.uri.rsplit(":", 1)[1]]
        words += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}", "--workers", "1"]
        words += ["--artifacts-destination", str(self.folder / "artifacts")]
        variables = {**os.environ, "PYTHONPATH": self.packages, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "mlflow.log").open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=self.folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        wait_for("the tracking server", self.is_up)

    def is_up(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(DEADLINE)
            self.process = None

    def ask(self, path: str, body: object = None, **query: str) -> dict[str, Any]:
        url = f"{self.uri}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        found = self.ask("experiments/get-by-name", experiment_name=experiment)["experiment"]
        body = {"experiment_ids": [found["experiment_id"]]}
        runs: list[dict[str, Any]] = self.ask("runs/search", body).get("runs", [])
        return runs

    def curves(self, run: str) -> dict[str, list[tuple[int, bytes]]]:
        """The values of all metrics as MLflow's own client reads them, in the order of their steps."""
        variables = {**os.environ, "PYTHONPATH": self.packages}
        words = [sys.executable, "-c", READ, self.uri, run]
        found = subprocess.run(words, env=variables, check=True, timeout=DEADLINE, stdout=subprocess.PIPE).stdout
        curves = json.loads(found)
        return {key: sorted((step, bits(value)) for step, value in values) for key, values in curves.items()}


@pytest.fixture
def mlflow(tmp_path: pathlib.Path) -> Iterator[Mlflow]:
    packages = os.environ.get("PSJOBS_MLFLOW")
    if not packages:
        pytest.skip("PSJOBS_MLFLOW names no folder with MLflow; `make test-python` does")
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = Mlflow(folder, packages)
    server.start()
    yield server
    server.stop()


def bits(value: float) -> bytes:
    """A value as a 32-bit float. SQL databases keep infinity as the greatest 64-bit float, and SQLite -0 as 0."""
    if math.isnan(value):
        return b"nan"
    if abs(value) > LARGEST:
        value = math.copysign(math.inf, value)
    return struct.pack("<f", value or 0.0)


def process_of(role: str, index: int, here: pathlib.Path) -> int | None:
    """The process of this test's job in that place."""
    wanted = {f"PSJOB_ROLE={role}", f"PSJOB_INDEX={index}", f"HERE={here}"}
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(file.read_text(errors="replace").split("\0")):
                return int(file.parent.name)
    return None


def step_of(here: pathlib.Path) -> int:
    texts = [file.read_text() for file in here.glob("step-*")]
    return max((int(text) for text in texts if text), default=0)


class Kills(threading.Thread):
    """Kills server 0 and the trainers in turn, each time when the job has moved on; in between MLflow is away."""

    def __init__(self, here: pathlib.Path, mlflow: Mlflow) -> None:
        super().__init__(daemon=True)
        self.here, self.mlflow, self.error = here, mlflow, ""

    def run(self) -> None:
        try:
            wait_for("a checkpoint", lambda: any(self.here.rglob("manifest.json")))
            for number in range(KILLS):
                if number == AWAY:
                    self.mlflow.stop()
                if number == BACK:
                    self.mlflow.start()
                role, index = [("ps", 0), ("trainer", 1), ("ps", 0), ("trainer", 0)][number % 4]
                victim = wait_for(f"{role} {index}", lambda: process_of(role, index, self.here))
                before = step_of(self.here)
                os.kill(victim, signal.SIGKILL)
                wait_for("another process", lambda: process_of(role, index, self.here) not in (None, victim))
                wait_for("a step", lambda: step_of(self.here) > before or before >= STEPS - 61)
        except Exception as error:
            self.error = repr(error)
        finally:
            (self.here / "killed").touch()


def script(folder: pathlib.Path) -> pathlib.Path:
    file = folder / "train.py"
    file.write_text(PRELUDE + f"EPOCHS, STEPS = {EPOCHS}, {STEPS}\n" + TRAIN)
    return file


def series(folder: pathlib.Path) -> dict[str, list[tuple[int, bytes]]]:
    """All curves of the job, as TensorBoard reads them."""
    (run,) = {found.parent for found in folder.rglob("trainer-0") if found.is_dir()}
    curves = {}
    for source in run.iterdir():
        reader = EventAccumulator(str(source), size_guidance={"tensors": 0, "scalars": 0})
        reader.Reload()
        for name in reader.Tags()["scalars"]:
            curves[f"{source.name}/{name}"] = [(event.step, bits(event.value)) for event in reader.Scalars(name)]
    return curves


def test_a_job_is_one_run_with_every_point_once_through_kills_and_a_tracking_server_that_is_away(
    tmp_path: pathlib.Path, mlflow: Mlflow
) -> None:
    spec = {
        "checkpoint.volumeClaim": {"size": "1Gi"},
        "checkpoint.intervalSeconds": 1,
        "failurePolicy.maxRestarts": 1000,
        "failurePolicy.backoff": {"initialSeconds": 1, "maxSeconds": 1},
        "tracking.mlflow": {"uri": mlflow.uri, "experiment": "kills"},
    }
    env = {"HERE": str(tmp_path), "PSJOBS_WORKER": program("psjobs-worker"), "OMP_NUM_THREADS": "1", "PACE": "0.01"}
    kills = Kills(tmp_path, mlflow)
    kills.start()
    training = {"consistency": {"mode": "Sync"}}
    psjobs.run(script(tmp_path), trainers=2, training=training, spec=spec, env=env, folder=tmp_path, quiet=True)
    kills.join()
    assert kills.error == ""
    (run,) = mlflow.runs("kills")
    run_id, info, data = run["info"]["run_id"], run["info"], run["data"]
    assert info["status"] == "FINISHED"
    parameters = {parameter["key"]: parameter["value"] for parameter in data["params"]}
    assert (parameters["trainers"], parameters["consistency.mode"]) == ("2", "Sync")
    wanted = series(tmp_path)
    assert len(wanted["trainer-0/odd"]) > STEPS // 2
    trainers = {key: curve for key, curve in wanted.items() if key.startswith("trainer-")}
    found = mlflow.curves(run_id)
    for key, curve in trainers.items():
        assert found[key] == curve, key
    # What the server measures is measured anew when it goes back; each step has one value.
    for key in set(wanted) - set(trainers):
        steps = [step for step, _ in found[key]]
        assert len(steps) == len(set(steps)) and {step for step, _ in wanted[key]} <= set(steps), key
    artifact = f"{mlflow.uri}/api/2.0/mlflow-artifacts/artifacts/{info['experiment_id']}/{run_id}/artifacts/model.safetensors"
    (model,) = (tmp_path / "checkpoints").rglob("model.safetensors")
    with urllib.request.urlopen(artifact, timeout=DEADLINE) as answer:
        assert answer.read() == model.read_bytes()


def test_a_job_whose_tracking_server_is_away_ends_well_and_is_sent_later(tmp_path: pathlib.Path, mlflow: Mlflow) -> None:
    mlflow.stop()
    (tmp_path / "killed").touch()
    spec = {
        "checkpoint.volumeClaim": {"size": "1Gi"},
        "checkpoint.intervalSeconds": 1,
        "tracking.mlflow": {"uri": mlflow.uri, "experiment": "later"},
    }
    env = {"HERE": str(tmp_path), "PSJOBS_WORKER": program("psjobs-worker"), "OMP_NUM_THREADS": "1", "PACE": "0"}
    psjobs.run(script(tmp_path), trainers=1, spec=spec, env=env, folder=tmp_path, quiet=True)
    mlflow.start()
    wanted = series(tmp_path)
    (model,) = (tmp_path / "checkpoints").rglob("model.safetensors")
    (folder,) = {found.parent for found in tmp_path.rglob("trainer-0") if found.is_dir()}
    uid = json.loads(next(model.parent.rglob("run.json")).read_text())["uid"]
    words = ["track", "--mlflow-uri", mlflow.uri, "--mlflow-experiment", "later", "--checkpoint-dir", str(model.parent)]
    words += ["--metrics-dir", str(folder), "--job-id", uid]
    for _ in range(2):
        subprocess.run([program("psjobs-worker"), *words], check=True, timeout=DEADLINE)
        (run,) = mlflow.runs("later")
        assert run["info"]["status"] == "FINISHED"
        assert mlflow.curves(run["info"]["run_id"]) == wanted
