// Watches a job on the page of all jobs in Chromium, as its user does, while `make e2e` disturbs it.
//
// ADDRESS is where the page is, TOKEN is for its form, JOB is NAMESPACE/NAME, CHROMIUM the browser. Each thing that it sees is a line
// of JSON. When the job is over, each line of standard input lets it load the pages anew. It ends with standard input, and
// fails if something is not to be seen or if the browser complains.

import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";
import { open, violations } from "./support.mjs";

const { ADDRESS, TOKEN, JOB, CHROMIUM } = process.env;
// Milliseconds until a page shows what has happened, and until a job is over.
const SHORT = 120_000;
const TRAINING = 420_000;
const PARTS = ["title", "phase", "explanation", "facts", "process-rows", "events", "manifest"];

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
const page = await open(browser, ADDRESS);
page.setDefaultTimeout(SHORT);

const say = (seen, shown = {}) => console.log(JSON.stringify({ seen, ...shown }));
const text = (selector) => page.locator(selector).innerText();
const row = (key) => page.locator(`tr[data-key="${key}"]`);
const labels = (selector) => page.locator(selector).evaluateAll((found) => found.map((one) => one.getAttribute("aria-label")));
const curves = () => labels("#charts canvas");

// Waits until the page shows a step after `number`, and returns the step.
async function stepAfter(number) {
  const shown = await page.waitForFunction((number) => {
    const step = document.querySelector("#facts").innerText.match(/step\s+([\d,]+)/)?.[1].replaceAll(",", "");
    return Number(step ?? 0) > number && step;
  }, number);
  return Number(await shown.jsonValue());
}

// Waits until the page says that a process was replaced, and shows a further step.
async function seeRestart(process, replica) {
  await page.waitForFunction(
    ([process, event]) => {
      const lane = document.querySelector(`tr[data-key="${process}"] svg.lane`)?.getAttribute("aria-label") ?? "";
      const isReplaced = /^started (\d+) times, failed [1-9]/.exec(lane)?.[1] > 1;
      return isReplaced && document.querySelector("#events").innerText.includes(event);
    },
    [process, `the pod of ${replica} was deleted or lost; it is started again`],
  );
  await page.waitForFunction(() => /restarts\s+[1-9]/.test(document.querySelector("#facts").innerText));
  // After the process was lost the job may go back to a checkpoint first.
  say(`${process} again`, { step: await stepAfter(await stepAfter(0)) });
}

// Loads the page of the job and the list of jobs anew, and returns all that they show of the job.
async function look() {
  await page.goto(`${ADDRESS}/#/${JOB}`);
  await page.reload();
  await page.waitForFunction(() => document.querySelector("#phase").innerText === "Succeeded" && document.querySelector("#charts canvas"));
  const shown = {};
  for (const part of PARTS) shown[part] = await page.locator(`#${part}`).textContent();
  shown.lanes = await labels("#process-rows svg.lane");
  shown.curves = await curves();
  assert.ok(shown.curves.some((curve) => curve.startsWith("loss, now ")), `a curve of the loss among ${shown.curves}`);
  for (const replica of ["trainer 1", "server 0"]) assert.ok(shown.events.includes(`the pod of ${replica} was deleted or lost`), shown.events);
  assert.deepEqual(await violations(page), []);

  await page.locator("a.home").click();
  await page.reload();
  await row(JOB).waitFor();
  shown.line = await row(JOB).innerText();
  assert.match(shown.line, /Succeeded/);
  assert.deepEqual(await violations(page), []);
  return shown;
}

try {
  await page.getByLabel("Token").fill(TOKEN);
  await page.getByRole("button", { name: "Show the jobs" }).click();
  await page.locator("a.home").click();
  await page.locator("#no-jobs").waitFor();
  say("the list");

  await row(JOB).getByRole("link").click();
  await page.waitForFunction(() => document.querySelector("#charts canvas")?.getAttribute("aria-label")?.startsWith("loss, now "));
  assert.equal(await text("#title"), JOB);
  // Server 0 is asked for these while somebody looks: the step of the trainer, and where its time goes.
  await page.waitForFunction(() => {
    const [step, , time] = document.querySelectorAll('tr[data-key="trainer-1"] td.of-trainer');
    return /^[\d,]+$/.test(step?.innerText) && time.title.includes("forward");
  });
  say("a loss", { step: await stepAfter(0) });
  await seeRestart("trainer-1", "trainer 1");
  await seeRestart("ps-0", "server 0");
  await page.waitForFunction(() => ["Succeeded", "Failed"].includes(document.querySelector("#phase").innerText), null, { timeout: TRAINING });
  assert.equal(await text("#phase"), "Succeeded", await text("#explanation"));
  assert.equal(await text("#connection"), "");
  say("the end", { curves: await curves() });

  for await (const _ of createInterface({ input: process.stdin })) say("the record", await look());
  // The first answer was the form, with the code 401.
  assert.deepEqual(page.complaints.filter((complaint) => !complaint.includes("status of 401")), []);
  const elsewhere = page.requests.filter((url) => !url.startsWith(`${ADDRESS}/`) && !url.startsWith("data:"));
  assert.deepEqual(elsewhere, [], "nothing is loaded from elsewhere");
} finally {
  await browser.close();
}
