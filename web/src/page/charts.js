// The curves of a job: one chart for each metric, over steps or time.
"use strict";

const charts = (() => {
  const COLORS = ["#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7d00", "#7a68c4", "#4c9a9a"];
  const FIRST = ["loss", "accuracy", "auc", "perplexity", "reward"];
  const HEIGHT = 210;
  // Maps a metric to its curves by trainer, "" for all, and to what is drawn of them.
  let metrics = new Map();
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function clear() {
    for (const metric of metrics.values()) metric.plot?.destroy();
    metrics = new Map();
    byId("charts").replaceChildren();
  }

  // Adds the points of a message: step, time and value of each follow each other.
  function read({ anew, curves: news }) {
    if (anew) clear();
    for (const { metric, trainer, from, points } of news) {
      if (!metrics.has(metric)) metrics.set(metric, { curves: new Map() });
      const { curves } = metrics.get(metric);
      const curve = curves.get(trainer ?? "") ?? { steps: [], times: [], values: [] };
      curves.set(trainer ?? "", curve);
      for (const list of Object.values(curve)) list.length = from;
      for (let at = 0; at < points.length; at += 3) {
        curve.steps.push(points[at]);
        curve.times.push(points[at + 1] / 1000);
        curve.values.push(points[at + 2]);
      }
      metrics.get(metric).isStale = true;
    }
  }

  function order(a, b) {
    const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
    return place(a[0]) - place(b[0]) || a[0].localeCompare(b[0]);
  }

  // Returns uPlot's tables: x of all curves, then the values of each. Trainers that report one metric have a curve each.
  function data(metric) {
    const over = byId("axis").value === "time" ? "times" : "steps";
    const finite = (value) => (typeof value === "number" ? value : null);
    const tables = metric.names.map((name) => {
      const curve = metric.curves.get(name);
      return [curve[over], curve.values.map(finite)];
    });
    return uPlot.join(tables);
  }

  // Says if the scale is logarithmic: the reader wants it, and every value has a logarithm.
  function isLogarithmic(metric) {
    const positive = (curve) => curve.values.every((value) => typeof value !== "number" || value > 0);
    return byId("logarithmic").checked && [...metric.curves.values()].every(positive);
  }

  function plot(name, metric, figure) {
    const style = getComputedStyle(document.documentElement);
    const color = (variable) => style.getPropertyValue(variable).trim();
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
    metric.names = [...metric.curves.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const isTime = byId("axis").value === "time";
    const series = metric.names.map((trainer, number) => ({
      label: trainer || "job",
      stroke: trainer ? COLORS[number % COLORS.length] : color("--curve"),
      width: trainer ? 1 : 2,
      spanGaps: true,
      value: (_, value) => (value === null ? "" : format.number(value)),
    }));
    metric.plot = new uPlot(
      {
        width: figure.clientWidth - 22,
        height: HEIGHT,
        scales: { x: { time: isTime }, y: { distr: isLogarithmic(metric) ? 3 : 1 } },
        axes: [axis, { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format.number(tick))) }],
        series: [{ label: isTime ? "time" : "step" }, ...series],
        legend: { show: metric.names.length > 1 },
        cursor: { sync: { key: "metrics" } },
      },
      data(metric),
      figure,
    );
  }

  // Returns what a chart is made of; if this changes it is made again.
  function make(metric) {
    return JSON.stringify([byId("axis").value, isLogarithmic(metric), dark.matches, [...metric.curves.keys()]]);
  }

  function last(metric) {
    const curve = metric.curves.get("") ?? metric.curves.values().next().value;
    return curve.values.length ? format.number(curve.values[curve.values.length - 1]) : "";
  }

  function draw() {
    const list = [...metrics].sort(order);
    byId("no-metrics").hidden = list.length > 0;
    const create = ([name]) => element("figure", {}, element("figcaption", {}, name, element("span")));
    keyed(byId("charts"), list, ([name]) => name, create, (figure, [name, metric]) => {
      setText(figure.querySelector("figcaption span"), last(metric));
      const made = make(metric);
      const width = figure.clientWidth - 22;
      if (metric.made !== made) {
        metric.plot?.destroy();
        plot(name, metric, figure);
        metric.made = made;
      } else if (metric.isStale) metric.plot.setData(data(metric));
      if (metric.plot.width !== width && width > 0) metric.plot.setSize({ width, height: HEIGHT });
      metric.isStale = false;
      const canvas = figure.querySelector("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${name}, now ${last(metric)}`);
    });
  }

  byId("axis").addEventListener("change", draw);
  byId("logarithmic").addEventListener("change", draw);
  dark.addEventListener("change", draw);
  // The width of the charts also changes when a scroll bar appears. They are drawn in the next frame, because drawing changes
  // the size that is observed.
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(byId("charts"));
  return { clear, read, draw };
})();
