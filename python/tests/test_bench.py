"""The benchmark of the package: each case is measured, or says why not."""

import json
import os
import signal
import subprocess
import sys

DEADLINE = 600


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark; after the deadline it ends with all that it has started."""
    command = [sys.executable, "-P", "-m", "psjobs.bench", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(30)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_every_case_is_measured_or_says_why_not():
    ran = bench("tcp", "small", "overlap", "mnist", "gpu", "--runs", "1", "--steps", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["tcp", "tcp-session", "small", "overlap", "mnist", "gpu"]
    for line in lines:
        assert line["bench"] == "python"
        reason = {"overlap": "namespace", "gpu": "CUDA", "mnist": "MNIST"}.get(line["case"])
        if reason and "left_out" in line:
            assert reason in line["left_out"]
        else:
            assert line["value"] > 0 and line["ratio"] == line["value"] / line["limit"] > 0


def test_wrong_arguments_are_refused():
    for arguments, said in [(["nope"], "there is no case nope; there are tcp, "), (["tcp", "--runs", "0"], "--runs is at least 1")]:
        ran = bench(*arguments)
        assert ran.returncode == 2
        assert said in ran.stderr
