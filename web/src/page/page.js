// Shows the list of jobs or one job, from the server's events or from the record in this file.
"use strict";

(() => {
  // Rows of the table of processes; of more, those that are not well are shown.
  const PROCESSES = 200;
  const LOG_PERIOD = 2000;
  // The parts of a trainer's time, in the order of a step.
  const PARTS = ["data", "forward", "backward", "compute", "exchange"];
  // Time after which a connection that the browser has given up is made again.
  const RETRY_PERIOD = 10000;
  // Sentences for answers with these codes.
  const REFUSALS = {
    401: "The server does not take your token any more. Reload the page to give a new one; until then this is the last that it said.",
    403: "Your token does not give the right to see this, if it is there.",
  };
  const record = byId("record") && JSON.parse(byId("record").textContent);
  // Holds what the server has sent: the job's parts, or a line for each job.
  let shown = {};
  let name = null;
  let source = null;
  let retry = null;
  // The server has answered: a job that it does not name is not there.
  let isKnown = false;
  let log = { process: null, timer: null, opener: null };

  const style = { Succeeded: "well", Failed: "bad", Running: "", Completing: "" };

  function now() {
    return shown.ended ?? (record ? record.time : Date.now());
  }

  // ---- the list of jobs

  function drawJobs() {
    document.title = "psjobs";
    setText(byId("title"), "jobs");
    setText(byId("phase"), "");
    const jobs = Object.entries(shown).sort(([, a], [, b]) => a.isOver - b.isOver || b.began - a.began);
    byId("no-jobs").hidden = jobs.length > 0;
    byId("job-table").hidden = jobs.length === 0;
    const create = ([job]) => {
      const link = element("a", { href: `#/${job}` }, job);
      return element("tr", {}, element("th", { scope: "row" }, link), ...Array.from({ length: 6 }, () => element("td")));
    };
    keyed(byId("job-rows"), jobs, ([job]) => job, create, (row, [, job]) => {
      const { step, totalSteps, examplesPerSecond, remainingSeconds, restarts } = job.progress;
      const cells = row.querySelectorAll("td");
      cells[0].className = job.needsHelp && !job.isOver ? "busy" : (style[job.phase] ?? "busy");
      setText(cells[0], job.phase);
      setText(cells[1], totalSteps ? `${Math.floor((step / totalSteps) * 100)} %` : "");
      setText(cells[2], !job.isOver && examplesPerSecond ? format.number(Math.round(examplesPerSecond)) : "");
      setText(cells[3], !job.isOver && remainingSeconds !== null ? format.span(remainingSeconds) : "");
      setText(cells[4], job.began ? format.span(((job.ended ?? Date.now()) - job.began) / 1000) : "");
      setText(cells[5], restarts ? String(restarts) : "");
    });
  }

  // ---- one job

  function drawExplanation({ sentences, commands, log, needsHelp }) {
    const parts = sentences.map((sentence) => element("p", {}, sentence));
    if (log) parts.push(element("p", {}, `The last lines of ${log.process}:`), element("pre", { tabindex: "0" }, log.text));
    for (const { command, purpose } of commands) {
      parts.push(element("p", {}, element("code", {}, command), element("span", { class: "quiet" }, `  ${purpose}`)));
    }
    const text = JSON.stringify([sentences, commands, log]);
    const target = byId("explanation");
    target.classList.toggle("help", needsHelp);
    if (target.dataset.text === text) return;
    target.dataset.text = text;
    target.replaceChildren(...parts);
  }

  function facts({ progress, began, checkpoint }) {
    const { step, totalSteps, examplesPerSecond, remainingSeconds, restarts } = progress;
    const list = [["step", totalSteps ? `${format.number(step)} of ${format.number(totalSteps)}` : format.number(step)]];
    if (!shown.isOver && examplesPerSecond) list.push(["examples/s", format.number(Math.round(examplesPerSecond))]);
    if (!shown.isOver && remainingSeconds !== null) list.push(["left", format.span(remainingSeconds)]);
    if (began) list.push(["time", format.span((now() - began) / 1000)]);
    if (restarts) list.push(["restarts", String(restarts)]);
    if (checkpoint) list.push(["checkpoint", `step ${format.number(checkpoint.step)}, ${format.clock(checkpoint.time)}`]);
    return list;
  }

  // Draws the times in which a process ran, as bars from the job's beginning until now.
  function drawLane(lane, runs) {
    const began = shown.began;
    const length = Math.max(1000, now() - began);
    const place = (time) => Math.min(1000, Math.max(0, ((time - began) / length) * 1000));
    keyed(lane, runs, (run) => run.from, () => element("rect", { y: "2", height: "12" }), (bar, run) => {
      const from = place(run.from);
      bar.setAttribute("x", from.toFixed(1));
      bar.setAttribute("width", Math.max(3, place(run.to ?? now()) - from).toFixed(1));
      bar.setAttribute("class", run.failed ? "run failed" : "run");
    });
    const failed = runs.filter((run) => run.failed).length;
    const last = runs[runs.length - 1];
    const since = last ? `; the last start at ${format.clock(last.from)}` : "";
    lane.setAttribute("aria-label", `started ${runs.length} times, failed ${failed} times${since}`);
  }

  // Draws where a trainer's time went, as a bar, with the shares in words for those who point at it or do not see it.
  function drawTime(cell, time) {
    const bar = cell.firstElementChild;
    bar.toggleAttribute("hidden", !time);
    if (!time) {
      cell.removeAttribute("title");
      return;
    }
    let end = 0;
    PARTS.forEach((part, at) => {
      bar.children[at].setAttribute("x", (end * 1000).toFixed(1));
      bar.children[at].setAttribute("width", (time[part] * 1000).toFixed(1));
      end += time[part];
    });
    const shares = [...PARTS.map((part) => [part, time[part]]), ["other", Math.max(0, 1 - end)]];
    const words = shares.filter(([, share]) => share > 0).map(([part, share]) => `${part} ${format.percent(share)}`);
    cell.title = words.join(", ");
    bar.setAttribute("aria-label", `the last 10 s: ${cell.title}`);
  }

  function createProcess({ name }) {
    const lane = element("svg", { class: "lane", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img" });
    const button = element("button", { type: "button", "aria-label": `show the log of ${name}` }, "show");
    button.addEventListener("click", () => openLog(name));
    const cells = Array.from({ length: 8 }, () => element("td"));
    cells[1].append(lane);
    const parts = PARTS.map((part) => element("rect", { class: part, height: "16" }));
    cells[4].append(element("svg", { class: "parts", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img" }, ...parts));
    for (const cell of cells.slice(2, 5)) cell.className = "of-trainer";
    cells[6].className = "node";
    cells[7].append(button);
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  }

  function drawProcesses({ processes, trainers }) {
    const by = new Map(trainers.map((trainer) => [trainer.name, trainer]));
    const ill = processes.filter((process) => !process.isWell);
    const rows = processes.length <= PROCESSES ? processes : [...ill, ...processes.filter((process) => process.isWell)].slice(0, PROCESSES);
    const hidden = processes.length - rows.length;
    setText(byId("more-processes"), hidden ? `${hidden} more are not shown; those that are not well come first.` : "");
    const hasNodes = processes.some((process) => process.node);
    keyed(byId("process-rows"), rows, (process) => process.name, createProcess, (row, process) => {
      const trainer = by.get(process.name);
      const cells = row.querySelectorAll("td");
      const slow = trainer?.isSlow ? ", slow" : "";
      cells[0].className = process.isWell && !slow ? "" : "bad";
      setText(cells[0], process.state + slow);
      drawLane(cells[1].firstElementChild, process.runs);
      setText(cells[2], trainer ? format.number(trainer.step) : "");
      setText(cells[3], trainer?.examplesPerSecond ? format.number(Math.round(trainer.examplesPerSecond)) : "");
      drawTime(cells[4], trainer?.time);
      setText(cells[5], String(process.runs.length));
      setText(cells[6], process.node ?? "");
    });
    for (const cell of document.querySelectorAll(".node")) cell.hidden = !hasNodes;
    byId("time-legend").hidden = !trainers.some((trainer) => trainer.time);
    for (const cell of document.querySelectorAll(".of-trainer")) cell.hidden = trainers.length === 0;
  }

  function drawEvents(events) {
    byId("no-events").hidden = events.length > 0;
    const key = (event) => `${event.time} ${event.text}`;
    const create = (event) =>
      element("li", {}, element("time", {}, format.clock(event.time)), element("span", { class: event.isWarning ? "busy" : "" }, event.text));
    keyed(byId("events"), [...events].reverse(), key, create, () => {});
  }

  function drawStaleness(counts) {
    byId("staleness").hidden = !counts.slice(1).some((count) => count > 0);
    const most = Math.max(1, ...counts);
    const label = (bucket) => (bucket < 3 ? String(bucket) : `${2 ** (bucket - 2) + 1}–${2 ** (bucket - 1)}`);
    const last = counts.reduce((end, count, at) => (count ? at + 1 : end), 0);
    const bars = counts.slice(0, last).map((count, bucket) => {
      const height = ((count / most) * 90).toFixed(1);
      const bar = element("rect", { width: "40", x: "0", y: String(90 - height), height });
      const picture = element("svg", { viewBox: "0 0 40 90", preserveAspectRatio: "none", role: "img", "aria-label": `${count} updates` }, bar);
      return element("div", {}, picture, label(bucket));
    });
    byId("staleness-bars").className = "bars";
    byId("staleness-bars").replaceChildren(...bars);
  }

  function drawJob() {
    const job = shown;
    const isThere = job.phase !== undefined && job.phase !== null;
    byId("job").hidden = !isThere;
    setText(byId("title"), name);
    if (!isThere) {
      document.title = name;
      byId("phase").className = "phase";
      setText(byId("phase"), "not there");
      charts.clear();
      return;
    }
    const { step, totalSteps } = job.progress;
    const share = totalSteps ? step / totalSteps : 0;
    document.title = job.isOver || !totalSteps ? `${job.phase}: ${name}` : `${Math.floor(share * 100)} % ${name}`;
    byId("phase").className = `phase ${style[job.phase] ?? "busy"}`;
    setText(byId("phase"), job.phase);
    drawExplanation(job.explanation);
    byId("bar").value = share;
    byId("bar").hidden = !totalSteps;
    const create = ([title]) => element("div", {}, element("dt", {}, title), element("dd"));
    keyed(byId("facts"), facts(job), ([title]) => title, create, (fact, [, value]) => setText(fact.querySelector("dd"), value));
    drawProcesses(job);
    drawEvents(job.events);
    drawStaleness(job.staleness);
    setText(byId("manifest"), job.manifest);
    charts.draw();
  }

  // ---- logs

  function openLog(process) {
    closeLog();
    log = { process, timer: null, opener: document.activeElement };
    setText(byId("log-title"), `Log of ${process}`);
    byId("log").hidden = false;
    readLog();
    byId("log-text").focus();
  }

  function closeLog() {
    clearTimeout(log.timer);
    log = { process: null, timer: null, opener: null };
    byId("log").hidden = true;
    byId("log-text").textContent = "";
  }

  // Closes the log and gives the focus back.
  function leaveLog() {
    const { opener } = log;
    closeLog();
    opener?.focus();
  }

  async function readLog() {
    const asked = log;
    let text = record ? record.tails[asked.process] || "It wrote nothing." : null;
    if (!record) {
      try {
        const answer = await fetch(`/logs/${encodeURIComponent(asked.process)}/${name}`);
        text = REFUSALS[answer.status] ?? ((await answer.text()) || "It wrote nothing yet.");
      } catch {
        text = byId("log-text").textContent || "The program that serves the page has ended; the log is in its folder of logs.";
      }
    }
    if (log !== asked) return;
    const target = byId("log-text");
    const isAtEnd = target.scrollTop + target.clientHeight >= target.scrollHeight - 4;
    setText(target, text);
    if (isAtEnd) target.scrollTop = target.scrollHeight;
    if (!record && !shown.isOver) log.timer = setTimeout(readLog, LOG_PERIOD);
  }

  // ---- what the server sends

  function draw() {
    if (name === null) drawJobs();
    else drawJob();
  }

  function apply(news) {
    const { curves, ...parts } = news;
    for (const [part, value] of Object.entries(parts)) {
      if (name === null && value === null) delete shown[part];
      else shown[part] = value;
    }
    if (curves) charts.read(curves);
    const jobs = Object.keys(shown);
    // The only job needs no list.
    if (name === null && jobs.length === 1 && location.hash === "") {
      history.replaceState(null, "", `#/${jobs[0]}`);
      show();
      return;
    }
    draw();
  }

  // Shows what the address names: `#/` all jobs, `#/NAME` one.
  function show() {
    source?.close();
    clearTimeout(retry);
    closeLog();
    name = record ? record.job.name : decodeURIComponent(location.hash.replace(/^#\/?/, "")) || null;
    shown = {};
    isKnown = false;
    charts.clear();
    byId("jobs").hidden = name !== null;
    byId("job").hidden = true;
    document.title = name ?? "psjobs";
    setText(byId("title"), name ?? "jobs");
    setText(byId("phase"), "");
    if (record) {
      apply({ ...record.job, curves: record.curves });
      return;
    }
    connect();
  }

  function connect() {
    source = new EventSource(name === null ? "/events" : `/events/${name}`);
    // A new connection begins with everything.
    source.onopen = () => {
      shown = {};
      isKnown = true;
      charts.clear();
      setText(byId("connection"), "");
    };
    source.onmessage = (message) => apply(JSON.parse(message.data));
    source.onerror = () => {
      if (shown.isOver) {
        // Another job may be served at this address later.
        source.close();
      } else if (source.readyState === EventSource.CLOSED) {
        // A browser tries again by itself after a broken connection, and not after an answer other than 200.
        explainRefusal(source);
        retry = setTimeout(connect, RETRY_PERIOD);
      } else {
        setText(byId("connection"), "The server does not answer; this is the last that it said.");
      }
    };
  }

  // Asks once more for the answer that ended a connection: a browser does not tell the page which it was.
  async function explainRefusal(refused) {
    const answer = await fetch(refused.url, { method: "HEAD" }).catch(() => null);
    if (source !== refused) return;
    const unknown = "The server does not answer, or refuses to show more; this is the last that it said.";
    setText(byId("connection"), REFUSALS[answer?.status] ?? unknown);
  }

  // Shows another part, and takes the focus along: in the list to the job that the reader comes from.
  function move() {
    const left = name;
    show();
    const row = name === null && [...byId("job-rows").children].find((row) => row.dataset.key === left);
    (row ? row.querySelector("a") : byId("title")).focus();
  }

  byId("close-log").addEventListener("click", leaveLog);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") leaveLog();
  });
  addEventListener("hashchange", move);
  // Times go on while nothing happens.
  setInterval(() => {
    if (isKnown && !shown.isOver) draw();
  }, 1000);
  show();
})();
