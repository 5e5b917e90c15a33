// Shows the page of a real job in Chromium: live, while a trainer is killed, and as a file when the job is over.
//
// PSJOBS and PSJOBS_WORKER are the programs, CHROMIUM the browser; SCREENSHOTS takes pictures, if it is set.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { chromium } from "playwright-core";
import { open, violations } from "./support.mjs";

const { PSJOBS, PSJOBS_WORKER, CHROMIUM, SCREENSHOTS } = process.env;
const MARKUP = "<img src=x onerror=window.broken=1><script>window.broken=1</script>";

// Two trainers and a server. Each trainer says its process id and something that looks like markup.
const manifest = (folder) => `
apiVersion: psjobs.dev/v1alpha1
kind: ParameterServerJob
metadata: {name: watched}
spec:
  training: {consistency: {mode: Async}, optimizer: {type: SGD, learningRate: 0.01}}
  trainer:
    replicas: 2
    template:
      spec:
        containers:
          - name: trainer
            command: [sh, -c, 'echo $$$$ > "${folder}/pid-$PSJOB_INDEX"; echo "$MARKUP"; exec "${PSJOBS_WORKER}" train mnist --epochs 1']
            env: [{name: OMP_NUM_THREADS, value: "1"}, {name: MARKUP, value: "${MARKUP}"}]
`;

let folder, browser, run, address;

before(async () => {
  folder = await mkdtemp(join(tmpdir(), "psjobs-page-"));
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
  const file = join(folder, "job.yaml");
  await writeFile(file, manifest(folder));
  run = spawn(PSJOBS, ["run", file, "--worker", PSJOBS_WORKER, "--web=127.0.0.1:0", "--log-dir", join(folder, "logs"), "--no-progress"]);
  run.ended = new Promise((resolve) => run.on("exit", resolve));
  run.text = "";
  address = await new Promise((resolve, reject) => {
    run.stderr.on("data", (data) => {
      run.text += data;
      const found = run.text.match(/http:\S+/);
      if (found) resolve(found[0]);
    });
    run.ended.then((code) => reject(new Error(`psjobs run ended with ${code}: ${run.text}`)));
  });
});

after(async () => {
  run?.kill();
  await browser?.close();
  await rm(folder, { recursive: true, force: true });
});

async function picture(page, name) {
  if (SCREENSHOTS) await page.screenshot({ path: join(SCREENSHOTS, `${name}.png`), fullPage: true });
}

// The page runs this: it returns the elements that reach beyond the screen, apart from those in a part that scrolls by itself.
function wide() {
  const right = (part) => part.getBoundingClientRect().right;
  const reaches = [...document.querySelectorAll("body *")].filter((part) => right(part) > innerWidth && !part.closest(".wide > *"));
  const found = reaches.map((part) => `${part.tagName} ${part.id} ${part.className} ends at ${right(part)} of ${innerWidth}`);
  return document.documentElement.scrollWidth > innerWidth ? ["the page scrolls sideways", ...found] : found;
}

const text = (page, selector) => page.locator(selector).innerText();
const row = (page, process) => page.locator(`tr[data-key="${process}"]`);

test("without the token there is no page", async () => {
  const page = await browser.newPage();
  const answer = await page.goto(new URL("/", address).href);
  assert.equal(answer.status(), 401);
  assert.match(await page.innerText("body"), /needs its token/);
  await page.close();
});

test("a page that the server refused connects again by itself", async () => {
  const page = await browser.newPage();
  let refusals = 1;
  await page.route(/\/events/, (route) => (refusals-- > 0 ? route.fulfill({ status: 503 }) : route.continue()));
  await page.clock.install();
  await page.goto(address);
  await page.waitForFunction(() => document.querySelector("#connection").innerText.includes("or refuses to show more"));
  await page.clock.fastForward(10_000);
  await page.waitForFunction(() => document.querySelector("#phase").innerText !== "");
  assert.equal(await text(page, "#title"), "watched");
  assert.equal(await text(page, "#connection"), "");
  await page.close();
});

test("a job is live in the page, and the same in its file when it is over", { timeout: 900_000 }, async () => {
  const page = await open(browser, address);
  assert.equal(new URL(page.url()).search, "", "the token is not in the address any more");
  await page.waitForFunction(() => document.querySelectorAll("#charts canvas").length >= 2, null, { timeout: 60_000 });
  assert.equal(await text(page, "#title"), "watched");
  assert.equal(await text(page, "#phase"), "Running");
  assert.match(await page.title(), /^\d+ % watched$/);
  await page.waitForFunction(() => document.querySelector("#charts canvas").getAttribute("aria-label").startsWith("loss, now "));

  // The curve grows without a reload.
  const step = async () => Number((await text(page, "#facts")).match(/step\s+([\d,]+)/)[1].replaceAll(",", ""));
  const first = await step();
  await page.waitForFunction((first) => Number(document.querySelector("#facts").innerText.match(/step\s+([\d,]+)/)[1].replaceAll(",", "")) > first, first);

  // Where the time of each trainer goes. This workload tells forward and backward apart, and waits for its server.
  for (const trainer of ["trainer-0", "trainer-1"]) {
    const bar = row(page, trainer).locator("svg.parts");
    await bar.and(page.locator("[aria-label]")).waitFor();
    const label = await bar.getAttribute("aria-label");
    assert.match(label, /^the last 10 s: data [\d.]+ %, forward [\d.]+ %, backward [\d.]+ %, exchange [\d.]+ %(, other [\d.]+ %)?$/);
    const widths = await bar.locator("rect").evaluateAll((parts) => parts.map((part) => Number(part.getAttribute("width"))));
    assert.ok(widths.reduce((sum, width) => sum + width, 0) <= 1000.5, `${trainer}: ${widths}`);
    assert.ok(widths[1] > 0 && widths[2] > 0, `${trainer}: ${widths}`);
  }
  assert.equal(await page.locator("#time-legend").isVisible(), true);

  // A log, by the keyboard alone. Text that looks like markup is text.
  await row(page, "trainer-1").getByRole("button").focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#log-text").innerText.includes("onerror"));
  assert.ok((await text(page, "#log-text")).includes(MARKUP));
  assert.equal(await page.evaluate(() => document.activeElement.id), "log-text");
  await page.keyboard.press("Escape");
  assert.equal(await page.locator("#log").isVisible(), false);
  assert.equal(await page.evaluate(() => document.activeElement.closest("tr").dataset.key), "trainer-1", "the focus is back");
  assert.equal(await page.evaluate(() => window.broken), undefined);

  // A trainer is killed: the page says so, and shows its successor.
  process.kill(Number(await readFile(join(folder, "pid-1"), "utf8")), "SIGKILL");
  await page.waitForFunction(() => document.querySelector("#events").innerText.includes("it is started again"));
  assert.match(await text(page, "#events"), /trainer 1 was killed by signal 9/);
  await page.waitForFunction(() => /restarts\s+1/.test(document.querySelector("#facts").innerText));
  const lane = row(page, "trainer-1").locator("svg.lane");
  assert.match(await lane.getAttribute("aria-label"), /^started 2 times, failed 1 times/);
  assert.equal(await lane.locator(".failed").count(), 1);

  await page.emulateMedia({ colorScheme: "dark" });
  assert.deepEqual(await violations(page), []);
  await picture(page, "page-dark");
  await page.emulateMedia({ colorScheme: "light" });
  assert.deepEqual(await violations(page), []);
  await picture(page, "page");

  // Over time instead of steps, and on a small screen.
  await page.selectOption("#axis", "time");
  await page.setViewportSize({ width: 380, height: 800 });
  // The curves follow the screen with its next frames.
  await page.waitForFunction(() => [...document.querySelectorAll("canvas")].every((canvas) => canvas.getBoundingClientRect().right <= innerWidth));
  assert.deepEqual(await page.evaluate(wide), [], "nothing is wider than the screen");
  const lefts = await page.locator("#time-legend span").evaluateAll((entries) => entries.map((entry) => entry.getBoundingClientRect().left));
  assert.equal(new Set(lefts).size, 1, `each entry of the legend has a line of its own: ${lefts}`);
  await picture(page, "page-narrow");
  await page.setViewportSize({ width: 1200, height: 900 });
  await page.selectOption("#axis", "step");

  // The end is shown before the server goes.
  assert.equal(await run.ended, 0, run.text);
  await page.waitForFunction(() => document.querySelector("#phase").innerText === "Succeeded");
  assert.match(await text(page, "#explanation"), /It took/);
  await row(page, "ps-0").getByRole("button").click();
  await page.waitForFunction(() => document.querySelector("#log-text").innerText.includes("has ended"));
  await page.keyboard.press("Escape");
  const elsewhere = page.requests.filter((url) => !url.startsWith(new URL("/", address).href) && !url.startsWith("data:"));
  assert.deepEqual(elsewhere, [], "nothing is loaded from elsewhere");
  const complaints = page.complaints.filter((complaint) => !/ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY/.test(complaint));
  assert.deepEqual(complaints, []);

  // The file shows the same, without a server.
  const record = await open(browser, `file://${join(folder, "logs", "watched.html")}`);
  for (const part of ["#title", "#phase", "#explanation", "#facts", "#process-rows", "#events", "#manifest"]) {
    const shown = (page) => page.locator(part).textContent();
    assert.equal(await shown(record), await shown(page), part);
  }
  const box = await record.locator("#explanation").boundingBox();
  assert.ok(box.y + box.height < 400, "what there is to say is at the top");
  const curves = (page) => page.evaluate(() => [...document.querySelectorAll("#charts canvas")].map((canvas) => canvas.getAttribute("aria-label")));
  assert.deepEqual(await curves(record), await curves(page));
  await row(record, "trainer-1").getByRole("button").click();
  assert.ok((await text(record, "#log-text")).includes(MARKUP));
  assert.deepEqual(await violations(record), []);
  assert.deepEqual(record.complaints, []);
  assert.equal(record.requests.filter((url) => url.startsWith("http")).length, 0);
  await picture(record, "record");
});
