"""Jobs that a script starts with `psjobs.run`, with servers of the package itself."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import psjobs
import pytest
import torch
from conftest import DEADLINE, PRELUDE, environment
from psjobs import notebook, safetensors

TRAIN = """
job = psjobs.join()
model, opt = job.attach(net())
for x, y in job.batches(data, 8, epochs=4):
    loss(model(x), y).backward()
    opt.step()
print(f"trainer {job.trainer} of {job.trainers} ended")
job.report({"accuracy": 0.5 + job.trainer})
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The psjobs-worker of the package, as pip installs it."""
    program = tmp_path / "psjobs-worker"
    program.write_text(f"#!{sys.executable}\nfrom psjobs.__main__ import worker\nworker()\n")
    program.chmod(0o755)
    monkeypatch.setenv("PSJOBS_WORKER", str(program))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def script(folder: pathlib.Path, text: str) -> pathlib.Path:
    file = folder / "train.py"
    file.write_text(PRELUDE + textwrap.dedent(text))
    return file


def test_a_script_runs_as_trainers_and_gives_its_summary_logs_and_model(tmp_path: pathlib.Path) -> None:
    training = {"consistency": {"mode": "Sync"}, "optimizer": {"type": "Adam", "learningRate": 0.01}, "seed": 3}
    job = psjobs.run(script(tmp_path, TRAIN), trainers=2, servers=2, training=training, quiet=True)
    summary = job.wait()
    assert (summary["trainers"], summary["servers"], summary["steps"]) == (2, 2, 2 * 24)
    assert summary["metrics"]["accuracy"] == 0.5, "that of trainer 0"
    assert job.status["state"] == "Succeeded"
    assert list(job.logs(index=1))[-1] == "trainer 1 of 2 ended"
    model = job.model()
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    net.load_state_dict(model)
    folder = job.folder
    del job
    assert not folder.exists(), "a temporary folder goes with the object"


def test_the_status_and_the_log_are_followed_while_the_job_runs(tmp_path: pathlib.Path) -> None:
    wait = "for x, y in job.batches(data, 8, epochs=4):\n    print('step', job.step, flush=True)"
    text = TRAIN.replace("for x, y in job.batches(data, 8, epochs=4):", wait) + "\nprint('the end')\n"
    job = psjobs.run(script(tmp_path, text), trainers=1, folder=tmp_path / "run", quiet=True, wait=False)
    lines = job.logs(follow=True)
    assert next(line for line in lines if line.startswith("step")) == "step 0"
    assert list(lines)[-1] == "the end", "a log that is followed ends with the job"
    job.wait(DEADLINE)
    assert (tmp_path / "run/trainer-0.log").exists()


def test_what_cannot_work_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(psjobs.InputError, match="no script .*missing.py"):
        psjobs.run("missing.py")
    with pytest.raises(psjobs.InputError, match="spec.training.optimiser is no known field; did you mean optimizer"):
        psjobs.run(script(tmp_path, TRAIN), training={"optimiser": {}}, quiet=True)
    with pytest.raises(psjobs.JobFailed, match="ValueError: no data"):
        text = "raise ValueError('no data')"
        psjobs.run(script(tmp_path, text), spec={"failurePolicy.maxRestarts": 0}, quiet=True)
    with pytest.raises(psjobs.InputError, match="no log of trainer 7"):
        psjobs.run(script(tmp_path, TRAIN), quiet=True).logs(index=7)


def test_a_job_that_is_stopped_leaves_no_process(tmp_path: pathlib.Path) -> None:
    text = "open(f'{os.environ[\"HERE\"]}/{os.getpid()}', 'w').close()\nimport time\ntime.sleep(1000)\n"
    here = tmp_path / "processes"
    here.mkdir()
    job = psjobs.run(script(tmp_path, text), env={"HERE": str(here)}, quiet=True, wait=False)
    end = time.monotonic() + DEADLINE
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() < end and job.status["state"] == "Running"
        time.sleep(0.05)
    with pytest.raises(TimeoutError, match="stop\\(\\) ends it"):
        job.wait(0.1)
    job.stop()
    assert job.status["state"] == "Interrupted"
    for process in here.iterdir():
        assert not pathlib.Path("/proc", process.name).exists()


SLOW = """
import os, psjobs, time, torch
job = psjobs.join()
model, opt = job.attach(torch.nn.Linear(2, 1))
data = torch.utils.data.TensorDataset(torch.ones(6000, 2))
for (x,) in job.batches(data, 1):
    open(os.environ["STARTED"], "w").close()
    time.sleep(1)
    model(x).sum().backward()
    opt.step()
"""


def test_ctrl_c_in_a_terminal_lets_a_step_end(tmp_path: pathlib.Path) -> None:
    started = tmp_path / "started"
    (tmp_path / "slow.py").write_text(SLOW)
    text = f"import psjobs\npsjobs.run({str(tmp_path / 'slow.py')!r}, folder={str(tmp_path)!r}, quiet=True)\n"
    command = [sys.executable, script(tmp_path, text)]
    variables = environment(STARTED=str(started))
    caller = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + DEADLINE
    while not started.exists():
        assert time.monotonic() < end and caller.poll() is None
        time.sleep(0.05)
    os.killpg(caller.pid, signal.SIGINT)
    _, said = caller.communicate(timeout=DEADLINE)
    assert "KeyboardInterrupt" in said, said
    log = (tmp_path / "ps-0.log").read_text()
    assert "left" in log and "finished=false" in log, log


def test_the_commands_of_the_package_are_those_of_psjobs(tmp_path: pathlib.Path) -> None:
    def call(*args: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "psjobs", *args]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE)

    assert "Run a job's servers and trainers" in call("run", "--help").stdout
    assert call("--version").stdout.startswith("psjobs ")
    assert call("run", "missing.yaml").returncode == 2
    worker = [os.environ["PSJOBS_WORKER"], "train", "mnist"]
    said = subprocess.run(worker, env=environment(), capture_output=True, text=True, timeout=DEADLINE)
    assert said.returncode == 2 and "has no workloads" in said.stderr


def test_a_model_that_is_torn_is_refused_in_a_sentence(tmp_path: pathlib.Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole)
    assert torch.equal(safetensors.read(file)["w"], torch.zeros(2))
    for broken in (b"", b"model", whole[:20], whole[:-1], whole.replace(b"F32", b"I64"), whole.replace(b"[2]", b"[3]")):
        file.write_bytes(broken)
        with pytest.raises(psjobs.InputError, match="no whole safetensors file"):
            safetensors.read(file)


def test_a_model_of_any_type_comes_back_from_its_file(tmp_path: pathlib.Path) -> None:
    tensors = {f"{dtype}": torch.arange(-3, 3).view(2, 3).to(dtype) for dtype in safetensors.NAMES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).t()}
    file = tmp_path / "a" / "model.safetensors"
    safetensors.write(file, tensors)
    back = psjobs.safetensors.read(file)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
    with pytest.raises(psjobs.InputError, match="w is torch.complex64"):
        safetensors.write(file, {"w": torch.zeros(1, dtype=torch.complex64)})
    # The file from before is whole, and nothing lies beside it.
    assert psjobs.safetensors.read(file).keys() == tensors.keys() and list(file.parent.iterdir()) == [file]


def test_the_table_of_a_notebook_shows_the_job_and_no_markup_of_it() -> None:
    status = {"state": "Running", "step": 1200, "totalSteps": 3000, "metrics": {"<b>": 0.5}, "warnings": ["<script>"]}
    shown = notebook.rows(status)
    assert "<td>Running</td>" in shown and "1,200 of 3,000" in shown and "<td>0.5</td>" in shown
    assert "<b>" not in shown and "<script>" not in shown
