#!/usr/bin/env python3
"""Asks the queries of the dashboards and the alerts of Prometheus' own engine, by promtool.

    helm template ... | queries.py PROMTOOL     the chart's alerts come on standard input

Every query of both dashboards must be well formed. Each panel of the training dashboard answers a question about a job whose
series are below: the answer must be the one written here. Each alert of training must fire for such a job, and not for
one that is well.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

FILES = pathlib.Path(__file__).parent.parent / "files"
OF_JOB = 'namespace="team",psjob="mnist"'
# By the quarter of a minute, over ten minutes; server 0 and server 1.
SERIES = {
    'step{server="0"}': "0+150x40",
    'step{server="1"}': "0+148x40",
    'total_steps{server="0"}': "12000x40",
    'metric{server="0",metric="loss"}': "2-0.03125x40",
    'examples_per_second{server="0"}': "320x40",
    'examples_per_second{server="1"}': "318x40",
    'trainer_steps{server="0",trainer="0"}': "0+75x40",
    'trainer_steps{server="0",trainer="1"}': "0+75x40",
    'trainer_own_steps_per_second{server="0",trainer="0"}': "10x40",
    'trainer_own_steps_per_second{server="0",trainer="1"}': "5x40",
    'trainer_straggles{server="0",trainer="0"}': "0x40",
    'trainer_straggles{server="0",trainer="1"}': "1x40",
    'trainer_silent_seconds{server="0",trainer="0"}': "1x40",
    'trainer_silent_seconds{server="1",trainer="0"}': "3x40",
    'trainer_silent_seconds{server="0",trainer="1"}': "0+15x40",
    'trainer_silent_seconds{server="1",trainer="1"}': "1+15x40",
    'staleness_bucket{server="0",le="0"}': "0x40",
    'staleness_bucket{server="0",le="1"}': "0+15x40",
    'staleness_bucket{server="0",le="2"}': "0+30x40",
    'staleness_bucket{server="0",le="+Inf"}': "0+30x40",
    'gradient_bytes_total{server="0"}': "0+3840x40",
    'gradient_bytes_total{server="1"}': "0+7680x40",
    'checkpoint_time_seconds{server="0"}': "300x40",
    'late_gradients_total{server="0"}': "0+1x40",
    'not_finite_gradients_total{server="1"}': "0+2x40",
    'block_busy_seconds_total{server="0",block="0",tensor="fc.weight"}': "0+3x40",
    'block_busy_seconds_total{server="1",block="1",tensor="fc.weight"}': "0+3x40",
    'block_busy_seconds_total{server="0",block="2",tensor="fc.bias"}': "0+3x40",
    'table_rows{server="0",table="clicks"}': "0+100x40",
    'table_rows{server="1",table="clicks"}': "0+100x40",
    'warnings{server="0"}': "1x40",
    'warnings{server="1"}': "0x40",
    'refused_peers_total{server="0"}': "0+2x40",
}
# The same of a job that is well.
WELL = {
    'trainer_silent_seconds{server="0",trainer="0"}': "3x1000",
    'trainer_straggles{server="0",trainer="0"}': "0x1000",
    'checkpoint_time_seconds{server="0"}': "0+15x1000",
    'not_finite_gradients_total{server="0"}': "4x1000",
    'warnings{server="0"}': "0x1000",
    'refused_peers_total{server="0"}': "7x1000",
}
# After ten minutes, by panel, the samples of each of its queries.
ANSWERS = {
    "Loss and other metrics": [{'{metric="loss"}': 0.75}],
    "Progress": [{"{}": 0.5}],
    "Time left": [{"{}": 600}],
    "Examples a second": [{"{}": 320}],
    "Pace of each trainer": [{'{trainer="0"}': 10, '{trainer="1"}': 5}],
    "Stragglers": [{"{}": 1}],
    "Waiting": [{'{trainer="0"}': 0.5, '{trainer="1"}': 0}],
    "Silence of each trainer": [{'{trainer="0"}': 1, '{trainer="1"}': 600}],
    "Staleness": [{"{}": 1}, {"{}": 1.98}],
    "Gradients by server": [{'{server="0"}': 256, '{server="1"}': 512}],
    "Age of the newest checkpoint": [{"{}": 300}],
    "Gradients dropped": [{"{}": 20}, {"{}": 40}],
    "Busiest tensors": [{'{tensor="fc.weight"}': 0.4, '{tensor="fc.bias"}': 0.2}],
    "Rows of sparse tables": [{'{table="clicks"}': 8000}],
    "Warnings": [{'{server="0"}': 1, '{server="1"}': 0}],
}
# When each alert fires for the first job, and what it names beside it. The checkpoint is an hour old after 65 minutes.
ALERTS = {
    "PsjobsTrainerSilent": ("10m", {"trainer": "1"}),
    "PsjobsTrainerStraggles": ("20m", {"trainer": "1"}),
    "PsjobsCheckpointOld": ("80m", {}),
    "PsjobsGradientsNotFinite": ("8m", {}),
    "PsjobsServerWarns": ("12m", {"server": "0"}),
    "PsjobsStrangersRefused": ("18m", {}),
}


def series(of: dict[str, str], job: str = OF_JOB) -> list[dict[str, str]]:
    return [{"series": f"psjobs_ps_{name[:-1]},{job}}}", "values": values} for name, values in of.items()]


def longer(of: dict[str, str]) -> dict[str, str]:
    """The same series over hours."""
    return {name: re.sub(r"x40$", "x1000", values) for name, values in of.items()}


def queries(dashboard: str) -> list[tuple[str, str]]:
    panels = json.loads((FILES / dashboard).read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]


def filled(ask: str, values: dict[str, str]) -> str:
    """The query with values in the place of the dashboard's variables."""
    for name, value in values.items():
        ask = ask.replace(name, value)
    return ask


def promtool(program: str, *words: str) -> None:
    ran = subprocess.run([program, *words], capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"FAIL: promtool {' '.join(words[:2])}\n{ran.stdout}{ran.stderr}")


def main() -> None:
    program, rendered = sys.argv[1], sys.stdin.read()
    folder = pathlib.Path(tempfile.mkdtemp())
    alerts = rendered[rendered.index("\nspec:\n") + len("\nspec:\n") :]
    (folder / "alerts.yaml").write_text(re.sub(r"^  ", "", alerts, flags=re.MULTILINE))
    promtool(program, "check", "rules", str(folder / "alerts.yaml"))

    # The last one is Grafana's, four times the interval of the PodMonitor.
    values = {"$namespace": "team", "$psjob": "mnist", "$__rate_interval": "1m"}
    training = [(title, filled(ask, values)) for title, ask in queries("training-dashboard.json")]
    asked = [*queries("dashboard.json"), *training]
    rules = [{"record": f"panel:{number}", "expr": ask} for number, (_, ask) in enumerate(asked)]
    (folder / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool(program, "check", "rules", str(folder / "panels.yaml"))

    open_answers = {title: list(answers) for title, answers in ANSWERS.items()}
    answered = []
    for title, ask in training:
        if not open_answers.get(title):
            sys.exit(f"FAIL: the panel {title!r} has a query without an answer in {pathlib.Path(__file__).name}")
        samples = [{"labels": labels, "value": value} for labels, value in open_answers[title].pop(0).items()]
        answered.append({"expr": ask, "eval_time": "10m", "exp_samples": samples})
    left = [title for title, answers in open_answers.items() if answers]
    if left:
        sys.exit(f"FAIL: no panel asks for {left}")

    texts = {}
    for block in re.split(r"\n *- alert: ", alerts)[1:]:
        found = re.search(r'severity: (\w+)\}\n *annotations:\n *summary: (.*)\n *description: "(.*)"', block)
        assert found is not None, block
        texts[block.split("\n")[0]] = found.groups()
    fires = []
    for name, (when, labels) in ALERTS.items():
        severity, summary, description = texts[name]
        labels = {"namespace": "team", "psjob": "mnist", "severity": severity, **labels}
        annotations = {"summary": summary, "description": description}
        fires.append({"eval_time": when, "alertname": name, "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]})
    missing = {name for name in texts if name in alerts.split("name: psjobs-training")[1]} - ALERTS.keys()
    if missing:
        sys.exit(f"FAIL: no test lets {sorted(missing)} fire")

    tests = [
        {"interval": "15s", "input_series": series(SERIES), "promql_expr_test": answered},
        {"interval": "15s", "input_series": [*series(longer(SERIES)), *series(WELL, 'namespace="team",psjob="well"')], "alert_rule_test": fires},
    ]
    (folder / "tests.yaml").write_text(json.dumps({"rule_files": ["alerts.yaml"], "evaluation_interval": "15s", "tests": tests}))
    promtool(program, "test", "rules", str(folder / "tests.yaml"))
    print(f"ok: {len(asked)} queries of the dashboards, {len(answered)} answers, {len(fires)} alerts")


if __name__ == "__main__":
    main()
