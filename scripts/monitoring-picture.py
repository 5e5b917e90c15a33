#!/usr/bin/env python3
"""Draws docs/images/monitoring.png: the panels of the chart's dashboard of a job, as Prometheus answers them for a real one.

    scripts/monitoring-picture.py PSJOBS_WORKER docs/images/monitoring.png

It starts two servers and four trainers of MNIST by hand and a Prometheus (that of Debian's package, see scripts/promtool.sh). One
trainer is stopped for moments, so that it is slow; another one is killed and started again. After MINUTES it asks every query
of charts/psjobs/files/training-dashboard.json and draws the answers in Chromium, with the plots of the job's page.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 5
TRAINERS, SERVERS = 4, 2
JOB = {"namespace": "default", "psjob": "mnist"}
# Seconds between two scrapes; Grafana takes rates over four of them.
INTERVAL = 5
COLORS = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        first = free_port()
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


def script(name: str) -> str:
    return subprocess.check_output([ROOT / "scripts" / name], text=True).strip().splitlines()[-1]


def start_prometheus(folder: Path, metrics: list[int]) -> tuple[subprocess.Popen, int]:
    jobs = [{"targets": [f"127.0.0.1:{port}"], "labels": {**JOB, "server": str(k)}} for k, port in enumerate(metrics)]
    config = {"global": {"scrape_interval": f"{INTERVAL}s"}, "scrape_configs": [{"job_name": "psjobs", "static_configs": jobs}]}
    (folder / "prometheus.json").write_text(json.dumps(config))
    port = free_port()
    program = Path(script("promtool.sh")).with_name("prometheus")
    arguments = [f"--config.file={folder}/prometheus.json", f"--storage.tsdb.path={folder}/series"]
    with (folder / "prometheus.log").open("w") as log:
        return subprocess.Popen([program, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=log), port


class Job:
    """The processes of a job that is started by hand."""

    def __init__(self, worker: str, folder: Path) -> None:
        self.worker, self.folder = worker, folder
        port, self.metrics = free_ports(SERVERS), [free_port() for _ in range(SERVERS)]
        self.place = ["--servers", str(SERVERS), "--world-size", str(SERVERS + TRAINERS), "--master-port", str(port)]
        self.servers = [self.start_server(index) for index in range(SERVERS)]
        self.trainers = [self.start_trainer(index, 0) for index in range(TRAINERS)]

    def start(self, name: str, arguments: list[str], **variables: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen([self.worker, *arguments, *self.place], env=environment, stderr=log, stdout=log)

    def start_server(self, index: int) -> subprocess.Popen:
        kept = ["--checkpoint-dir", str(self.folder / "checkpoints"), "--checkpoint-interval", "30"]
        optimizer = ["--learning-rate", "0.005", "--momentum", "0.9"]
        ports = ["--no-shared-memory", "--rank", str(index), "--metrics-port", str(self.metrics[index])]
        return self.start(f"server-{index}", ["serve", *ports, *kept, *optimizer])

    def start_trainer(self, index: int, incarnation: int) -> subprocess.Popen:
        arguments = ["train", "mnist", "--epochs", "15", "--rank", str(SERVERS + index)]
        return self.start(f"trainer-{index}", arguments, PSJOB_INCARNATION=str(incarnation))

    def check(self) -> None:
        for process in self.servers:
            if process.poll() is not None:
                sys.exit(f"a server has ended; its log is in {self.folder}")

    def end(self) -> None:
        for process in [*self.trainers, *self.servers]:
            process.kill()
            process.wait()


def disturb(job: Job) -> tuple[float, float]:
    """Lets the job train, with a slow trainer and one that is lost; the times when that began and ended."""
    begun, seconds = time.time(), 60 * MINUTES
    lost_at, back_at = 0.5 * seconds, 0.5 * seconds + 25
    is_lost, is_back = False, False
    while (since := time.time() - begun) < seconds:
        job.check()
        if 0.3 * seconds < since < 0.8 * seconds:
            job.trainers[3].send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            job.trainers[3].send_signal(signal.SIGCONT)
        time.sleep(0.15)
        if since > lost_at and not is_lost:
            is_lost = True
            job.trainers[1].kill()
            job.trainers[1].wait()
        if since > back_at and not is_back:
            is_back = True
            job.trainers[1] = job.start_trainer(1, 1)
    return begun, time.time()


def ask(port: int, query: str, begun: float, ended: float) -> list[dict]:
    for name, value in JOB.items():
        query = query.replace(f"${name}", value)
    query = query.replace("$__rate_interval", f"{4 * INTERVAL}s")
    asked = urllib.parse.urlencode({"query": query, "start": begun, "end": ended, "step": 1})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{asked}") as answer:
        return json.load(answer)["data"]["result"]


def panels(port: int, begun: float, ended: float) -> list[dict]:
    drawn = []
    for panel in json.loads((ROOT / "charts/psjobs/files/training-dashboard.json").read_text())["panels"]:
        lines = []
        for target in panel["targets"]:
            for series in ask(port, target["expr"], begun, ended):
                legend = target["legendFormat"]
                for name, value in series["metric"].items():
                    legend = legend.replace("{{" + name + "}}", value)
                points = {int(float(at) - begun): float(value) for at, value in series["values"]}
                lines.append({"label": legend, "values": [points.get(at) for at in range(int(ended - begun))]})
        unit = panel["fieldConfig"]["defaults"]["unit"]
        drawn.append({"title": panel["title"], "type": panel["type"], "unit": unit, "lines": lines})
    return drawn


PAGE = """<!doctype html><meta charset="utf-8"><style>{style}
body {{ margin: 0; padding: 12px; background: #111217; color: #ccccdc; font: 13px sans-serif; width: 1500px }}
main {{ display: grid; grid-template-columns: repeat(3, 1fr); gap: 10px }}
section {{ background: #181b1f; border: 1px solid #25272c; border-radius: 3px; padding: 8px; height: 196px }}
h2 {{ font-size: 13px; font-weight: 500; margin: 0 0 4px }}
p {{ font-size: 54px; text-align: center; margin: 44px 0; color: #73bf69 }}
.none {{ font-size: 16px; color: #808790; margin-top: 76px }}
.legend {{ font-size: 11px; height: 15px; overflow: hidden; white-space: nowrap }}
.legend i {{ display: inline-block; width: 12px; height: 3px; margin: 0 4px 3px 10px }}
</style><main></main><script>{plots}</script><script>
const panels = {panels}, colors = {colors};
const short = (value, unit) => {{
  if (unit === "percentunit") return Math.round(value * 100) + " %";
  if (unit === "s") return value < 90 ? Math.round(value) + " s" : (value / 60).toFixed(1) + " min";
  const letter = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size);
  const text = letter ? +(value / letter[0]).toPrecision(3) + " " + letter[1] : +value.toPrecision(3) + "";
  return unit === "Bps" ? text + "B/s" : text;
}};
for (const panel of panels) {{
  const card = document.querySelector("main").appendChild(document.createElement("section"));
  card.appendChild(document.createElement("h2")).textContent = panel.title;
  const last = panel.lines[0]?.values.findLast(value => value !== null);
  if (last === undefined) {{
    const none = card.appendChild(document.createElement("p"));
    none.className = "none";
    none.textContent = "No data";
  }} else if (panel.type !== "timeseries") {{
    card.appendChild(document.createElement("p")).textContent = short(last, panel.unit);
  }} else {{
    const seconds = panel.lines[0].values.map((_, second) => second);
    const series = panel.lines.map((line, index) => ({{ stroke: colors[index % colors.length], width: 1.4, label: line.label }}));
    const look = {{ stroke: "#808790", grid: {{ stroke: "#25272c", width: 1 }}, ticks: {{ show: false }}, font: "11px sans-serif" }};
    const top = (_, least, most) => [Math.min(least, 0), Math.max(most * 1.1, most === 0 ? 1 : most)];
    new uPlot({{
      width: 470, height: 160, legend: {{ show: false }}, cursor: {{ show: false }},
      scales: {{ x: {{ time: false }}, y: {{ range: top }} }},
      axes: [{{ ...look, size: 22, incrs: [60], values: (_, all) => all.map(at => at / 60 + " min") }},
             {{ ...look, size: 62, values: (_, all) => all.map(at => short(at, panel.unit)) }}],
      series: [{{}}, ...series],
    }}, [seconds, ...panel.lines.map(line => line.values)], card);
    const legend = card.appendChild(document.createElement("div"));
    legend.className = "legend";
    panel.lines.forEach((line, index) => {{
      legend.appendChild(document.createElement("i")).style.background = colors[index % colors.length];
      legend.append(line.label);
    }});
  }}
}}
</script>"""


def draw(drawn: list[dict], folder: Path, picture: Path) -> None:
    plots = ROOT / "web/src/page/uplot"
    page = PAGE.format(
        style=(plots / "uPlot.min.css").read_text(),
        plots=(plots / "uPlot.iife.min.js").read_text(),
        panels=json.dumps(drawn).replace("</", "<\\/"),
        colors=json.dumps(COLORS),
    )
    (folder / "page.html").write_text(page)
    shot = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000", "--window-size=1524,1140"]
    subprocess.run(
        [script("browser.sh"), *shot, f"--screenshot={picture.resolve()}", f"file://{folder}/page.html"],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    worker, picture = sys.argv[1:]
    subprocess.run([ROOT / "scripts/mnist.sh"], check=True)
    folder = Path(tempfile.mkdtemp(prefix="monitoring-"))
    job = Job(worker, folder)
    prometheus, port = start_prometheus(folder, job.metrics)
    try:
        print(f"a job trains for {MINUTES} minutes; logs are in {folder}", flush=True)
        begun, ended = disturb(job)
        drawn = panels(port, begun, ended)
    finally:
        job.end()
        prometheus.terminate()
        prometheus.wait()
    (folder / "panels.json").write_text(json.dumps(drawn))
    draw(drawn, folder, Path(picture))


if __name__ == "__main__":
    main()
