"""The series of a job's metrics, as TensorBoard's own reader returns them."""

import json
import pathlib
import struct
import threading

import psjobs
from conftest import DEADLINE, PRELUDE, Jobs, program, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

STEPS = 6 * 600

# Server 0 is killed once, when there is a checkpoint and TensorBoard has read some points. Each trainer writes down what it has reported.
TRAIN = """
import json, pathlib, signal, struct, time
def kill_server():
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = file.read_text().split("\\0")
        except OSError:
            continue
        if {"PSJOB_ROLE=ps", "PSJOB_INDEX=0", f"PSJOB_UID={os.environ['PSJOB_UID']}"} <= set(variables):
            os.kill(int(file.parent.name), signal.SIGKILL)
job = psjobs.join()
model, opt = job.attach(net())
here = pathlib.Path(os.environ["HERE"])
odd = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4028234663852886e38, 1 / 3]
reported = {}
latest = time.monotonic() + 120
for x, y in job.batches(data, 8, epochs=600):
    value = loss(model(x), y)
    value.backward()
    while job.trainer == 1 and job.step == 1800 and not (here / "watched").exists() and time.monotonic() < latest:
        time.sleep(0.01)
    is_due = job.trainer == 1 and not (here / "killed").exists()
    if is_due and (here / "watched").exists() and any((here / "checkpoints").rglob("manifest.json")):
        (here / "killed").touch()
        kill_server()
    before = job.step
    opt.step()
    if job.step == before + 1:
        metrics = {"loss": value.item() + job.trainer, "odd": odd[job.step % len(odd)]}
        job.report(metrics)
        reported[job.step] = metrics
print("rewinds", job._rewinds)
(here / f"reported-{job.trainer}.json").write_text(json.dumps(sorted(reported.items())))
"""


def bits(value: float) -> bytes:
    """A float as TensorBoard keeps it; each that is no number is the same."""
    return b"nan" if value != value else struct.pack("<f", value)


class Watch(threading.Thread):
    """A TensorBoard that runs beside the job and reads a folder again and again."""

    def __init__(self, metrics: pathlib.Path) -> None:
        super().__init__(daemon=True)
        self.metrics, self.ended = metrics, threading.Event()
        self.reader: EventAccumulator | None = None

    def run(self) -> None:
        while not self.ended.wait(0.1):
            try:
                folder = next(self.metrics.rglob("trainer-0"), None)
            except FileNotFoundError:
                continue  # An old checkpoint was deleted meanwhile.
            if folder is None:
                continue
            if self.reader is None:
                self.reader = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
            self.reader.Reload()
            if "loss" in self.reader.Tags()["scalars"]:
                (self.metrics / "watched").touch()


def test_every_point_is_there_once_and_bit_equal_although_server_0_is_killed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PRELUDE + TRAIN)
    spec = {"checkpoint.volumeClaim": {"size": "1Gi"}, "checkpoint.intervalSeconds": 1}
    env = {"HERE": str(tmp_path), "PSJOBS_WORKER": program("psjobs-worker"), "OMP_NUM_THREADS": "1"}
    watch = Watch(tmp_path)
    watch.start()
    job = psjobs.run(
        file, trainers=2, training={"consistency": {"mode": "Sync"}}, spec=spec, env=env, folder=tmp_path, quiet=True
    )
    watch.ended.set()
    watch.join()
    assert [line for line in job.logs(index=0) if line.startswith("rewinds")] == ["rewinds 1"], job.logs(index=0)
    (run,) = {folder.parent for folder in tmp_path.rglob("trainer-0") if folder.is_dir()}
    for trainer in range(2):
        readers = [EventAccumulator(str(run / f"trainer-{trainer}"), size_guidance={"tensors": 0, "scalars": 0})]
        if trainer == 0:
            assert watch.reader is not None
            readers.append(watch.reader)
        reported = json.loads((tmp_path / f"reported-{trainer}.json").read_text())
        assert len(reported) == STEPS
        for number, reader in enumerate(readers):
            reader.Reload()
            for name in ("loss", "odd"):
                found = [(event.step, bits(event.value)) for event in reader.Scalars(name)]
                assert found == [(step, bits(metrics[name])) for step, metrics in reported], (trainer, name, number)
    server = EventAccumulator(str(run / "job"), size_guidance={"tensors": 0, "scalars": 0})
    server.Reload()
    assert {"examples_per_second", "learning_rate", "stragglers", "trainers"} <= set(server.Tags()["scalars"])
    steps = [event.step for event in server.Scalars("learning_rate")]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert "staleness" not in server.Tags()["scalars"], "no update of Sync is stale"


def written(folder: pathlib.Path) -> dict[str, list[tuple[int, bytes]]]:
    """The curves in the event files of a source, read without TensorBoard's reader."""
    curves: dict[str, list[tuple[int, bytes]]] = {}
    for file in sorted(folder.iterdir()):
        records = file.read_bytes()
        while records:
            (length,) = struct.unpack_from("<Q", records)
            event = Event.FromString(records[12 : 12 + length])
            records = records[16 + length :]
            if event.session_log.status == SessionLog.START:
                curves = {name: [point for point in curve if point[0] < event.step] for name, curve in curves.items()}
            for value in event.summary.value:
                curves.setdefault(value.tag, []).append((event.step, bits(value.simple_value)))
    return curves


def test_waiting_and_staleness_have_the_bits_of_the_series(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    metrics = tmp_path / "metrics"
    mode = {"mode": "Async"}
    job = jobs.start("--consistency", "async", "--metrics-dir", str(metrics), trainers=2, consistency=mode)
    train = "train mlp --device cpu --max-steps 100 --example-ms 1"
    succeed(*(job.start(index, program("psjobs-worker"), *train.split()) for index in range(2)))
    assert job.server.wait(DEADLINE) == 0, job.log.read_text()
    for source, name, most in [("trainer-0", "waiting", 1.0), ("trainer-1", "waiting", 1.0), ("job", "staleness", 100.0)]:
        reader = EventAccumulator(str(metrics / source), size_guidance={"tensors": 0, "scalars": 0})
        reader.Reload()
        curves = written(metrics / source)
        assert set(curves) == set(reader.Tags()["scalars"])
        for curve, points in curves.items():
            assert [(event.step, bits(event.value)) for event in reader.Scalars(curve)] == points, (source, curve)
        values = [event.value for event in reader.Scalars(name)]
        assert values and all(0.0 <= value <= most for value in values), (source, values)
