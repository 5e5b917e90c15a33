"""The benchmark of the package: each case is measured, or says why not."""

import json
import subprocess
import sys


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "psjobs.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_every_case_is_measured_or_says_why_not():
    ran = bench("tcp", "small", "overlap", "mnist", "gpu", "--runs", "1", "--steps", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["tcp", "tcp-session", "small", "overlap", "mnist", "gpu"]
    for line in lines:
        assert line["bench"] == "python"
        if line["case"] in ("overlap", "gpu") and "left_out" in line:
            assert "namespace" in line["left_out"] or "CUDA" in line["left_out"]
        else:
            assert line["value"] > 0 and line["ratio"] == line["value"] / line["limit"] > 0


def test_wrong_arguments_are_refused():
    for arguments, said in [(["nope"], "there is no case nope; there are tcp, "), (["tcp", "--runs", "0"], "--runs is at least 1")]:
        ran = bench(*arguments)
        assert ran.returncode == 2
        assert said in ran.stderr
