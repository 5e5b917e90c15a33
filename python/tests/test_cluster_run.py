"""Waiting for a job on a cluster, with a kubectl that says what the real one says in these cases."""

from __future__ import annotations

import json
import pathlib
import stat

import pytest

import psjobs
from psjobs import cluster_run
from psjobs.cluster_run import ClusterRun

REFUSED = "The connection to the server 127.0.0.1:6443 was refused - did you specify the right host or port?"
GONE = 'Error from server (NotFound): parameterserverjobs.psjobs.dev "mnist" not found'


def answers(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *replies: str) -> None:
    """Puts a kubectl first on PATH that gives one answer after the other, the last one for ever: a phase, or an error."""
    for number, reply in enumerate(replies):
        (folder / str(number)).write_text(reply)
    script = folder / "kubectl"
    script.write_text(
        f"""#!/bin/sh
cd {folder}
number=$(cat calls 2> /dev/null || echo 0)
echo $((number + 1)) > calls
[ -f "$number" ] || number={len(replies) - 1}
case $(cat "$number") in
  "{{"*) cat "$number" ;;
  *) cat "$number" >&2; exit 1 ;;
esac
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(cluster_run, "POLL", 0.01)


def job(phase: str) -> str:
    return json.dumps({"metadata": {"namespace": "team"}, "status": {"phase": phase}})


def test_the_wait_goes_on_while_the_api_server_is_away(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(tmp_path, monkeypatch, job("Running"), REFUSED, REFUSED, job("Succeeded"))
    assert ClusterRun("mnist", "team").wait()["state"] == "Succeeded"
    said = capsys.readouterr().err.splitlines()
    assert said == ["mnist: Running", f"mnist: cannot be read, and is tried again: {REFUSED}", "mnist: Succeeded"]


def test_the_wait_ends_when_the_api_server_stays_away(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, REFUSED)
    monkeypatch.setattr(cluster_run, "AWAY", 0.1)
    with pytest.raises(psjobs.Error, match="was refused"):
        ClusterRun("mnist", "team").wait(quiet=True)


def test_a_job_that_is_gone_is_not_waited_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, job("Running"), GONE)
    with pytest.raises(psjobs.Error, match="not found"):
        ClusterRun("mnist", "team").wait(quiet=True)
    assert (tmp_path / "calls").read_text().strip() == "2"


@pytest.mark.parametrize(
    ("servers", "spec", "has_volume"),
    [(1, {}, True), (2, {}, False), (1, {"ps.replicas": 4}, False), (4, {"ps.replicas": 1}, True), (1, {"checkpoint": None}, False)],
    ids=["one server", "two", "four by the spec", "one by the spec", "none wanted"],
)
def test_one_server_alone_has_a_volume_by_default(servers: int, spec: dict[str, object], has_volume: bool) -> None:
    manifest = cluster_run.job_manifest("mnist", "train.py", [], 2, servers, 0, "image", {}, spec, {}, None)
    assert (manifest["spec"].get("checkpoint") is not None) == has_volume
