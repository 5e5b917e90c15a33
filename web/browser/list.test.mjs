// Shows psjobs-web in Chromium as its users see it: the login, the list of jobs, a job.
//
// webserver/tests/browser.rs starts it, with the address, tokens, the namespace that TOKEN gives the right to see and JOBS, its
// jobs and their phases in the order of the list. A line `please: end NAME` or `please: create NAME` asks that program for a
// change. SCREENSHOTS takes a picture, if it is set.

import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { chromium } from "playwright-core";
import { open, violations } from "./support.mjs";

const { ADDRESS, TOKEN, TOKEN_WITHOUT_RIGHTS, NAMESPACE, OTHER_JOB, MARKUP, CHROMIUM, SCREENSHOTS } = process.env;
const JOBS = JSON.parse(process.env.JOBS);
const FIRST = `${NAMESPACE}/${JOBS[0][0]}`;
const SECOND = `${NAMESPACE}/${JOBS[1][0]}`;
const WITH_MARKUP = `${NAMESPACE}/markup`;
const SIZE = { viewport: { width: 1280, height: 800 }, colorScheme: "light" };
const TIME = { timeout: 180_000 };

let browser;

before(async () => {
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
});
after(() => browser?.close());

// Asks the program that started this one for a change of the cluster. It writes nothing back: the page shows what has changed.
function please(wish) {
  process.stdout.write(`\nplease: ${wish}\n`);
}

// Opens the page, and gives it a token as a reader does who has no mouse.
async function enter(token) {
  const page = await open(browser, ADDRESS, SIZE);
  page.setDefaultTimeout(60_000);
  await give(page, token);
  return page;
}

async function give(page, token) {
  // The browser gives the field the focus.
  await page.waitForFunction(() => document.activeElement.name === "token");
  await page.keyboard.insertText(token);
  await Promise.all([page.waitForEvent("load"), page.keyboard.press("Enter")]);
}

// Returns the jobs of the list with their phases.
const list = (page) =>
  page.evaluate(() => [...document.querySelectorAll("#job-rows tr")].map((row) => [row.dataset.key, row.querySelector("td").textContent]));
const waitForList = (page, length) => page.waitForFunction((length) => document.querySelectorAll("#job-rows tr").length === length, length);
const waitForText = (page, selector, text) =>
  page.waitForFunction(([selector, text]) => document.querySelector(selector)?.textContent.includes(text), [selector, text]);
const waitForFocus = (page, tag, text) =>
  page.waitForFunction(([tag, text]) => document.activeElement.tagName === tag && document.activeElement.textContent === text, [tag, text]);
const focused = (page) => page.evaluate(() => document.activeElement.textContent);

async function assertAccessible(page) {
  for (const colorScheme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme });
    assert.deepEqual(await violations(page), [], colorScheme);
  }
}

// The browser itself writes that a page was answered by 401, as it is without a token.
function assertQuiet(page) {
  assert.deepEqual(page.complaints.filter((complaint) => !/status of 401/.test(complaint)), []);
  const elsewhere = page.requests.filter((url) => !url.startsWith(ADDRESS) && !url.startsWith("data:"));
  assert.deepEqual(elsewhere, [], "nothing is loaded from elsewhere");
}

test("without a token there is a form, which says what to do about a wrong one", TIME, async () => {
  const page = await open(browser, ADDRESS, SIZE);
  assert.match(await page.innerText("main"), /kubectl create token/);
  await assertAccessible(page);
  for (const [token, sentence] of [
    ["wrong", /does not know this token, or it has expired/],
    ["two words", /This is not a token\. Copy the whole of it/],
  ]) {
    await give(page, token);
    assert.match(await page.innerText("#why"), sentence);
    assert.match(await page.innerText("main"), /kubectl create token/);
    assert.equal(await page.inputValue("input"), "", "the wrong one is not shown again");
  }
  await assertAccessible(page);
  await give(page, TOKEN);
  await waitForList(page, JOBS.length);
  assert.equal(new URL(page.url()).pathname, "/");
  assertQuiet(page);
  await page.context().close();
});

test("a reader who came by the link of a job sees it after the login", TIME, async () => {
  const page = await open(browser, new URL(`#/${SECOND}`, ADDRESS).href, SIZE);
  page.setDefaultTimeout(60_000);
  await give(page, "wrong");
  await give(page, TOKEN);
  await waitForText(page, "#title", SECOND);
  assert.equal(new URL(page.url()).hash, `#/${SECOND}`);
  assertQuiet(page);
  await page.context().close();
});

test("a token without rights shows a list that says why it is empty", TIME, async () => {
  const page = await enter(TOKEN_WITHOUT_RIGHTS);
  await page.getByText("none that you have the right to see").waitFor();
  assert.equal(await page.locator("#job-table").isVisible(), false);
  await assertAccessible(page);
  assertQuiet(page);
  await page.context().close();
});

test("the list has the jobs of the namespace, is live, and needs no mouse", TIME, async () => {
  const page = await enter(TOKEN);
  await waitForList(page, JOBS.length);
  const wanted = JOBS.map(([name, phase]) => [`${NAMESPACE}/${name}`, phase]);
  assert.deepEqual(await list(page), wanted);
  if (SCREENSHOTS) await page.screenshot({ path: join(SCREENSHOTS, "list.png") });
  await assertAccessible(page);

  // Into a job and back.
  for (const text of ["psjobs", FIRST, SECOND]) {
    await page.keyboard.press("Tab");
    assert.equal(await focused(page), text);
  }
  await page.keyboard.press("Enter");
  await waitForText(page, "#phase", JOBS[1][1]);
  assert.equal(await page.innerText("#title"), SECOND);
  // The title has the focus, so that it is read out.
  await waitForFocus(page, "H1", SECOND);
  assert.equal(await page.locator("#jobs").isVisible(), false);
  await page.waitForFunction(() => document.querySelectorAll("#charts canvas").length > 0);
  await assertAccessible(page);
  await page.goBack();
  // The reader goes on in the list where they left it.
  await waitForFocus(page, "A", SECOND);
  assert.deepEqual([await page.title(), await page.innerText("#title")], ["psjobs", "jobs"]);
  await waitForList(page, JOBS.length);

  // Another job ends, and goes to the place of those that are over, below the one that has the focus.
  await page.evaluate(() => (window.isTheSamePage = true));
  please(`end ${JOBS[0][0]}`);
  await page.waitForFunction((job) => document.querySelector(`tr[data-key="${job}"] td`)?.textContent === "Succeeded", FIRST);
  const over = JOBS.findIndex(([, phase]) => ["Succeeded", "Failed"].includes(phase));
  const after = [...wanted.slice(1, over), [FIRST, "Succeeded"], ...wanted.slice(over)];
  assert.deepEqual(await list(page), after);
  assert.equal(await focused(page), SECOND, "a job that moves takes the focus from no other");
  please("create later");
  await page.waitForFunction((job) => document.querySelector(`tr[data-key="${job}"]`) !== null, `${NAMESPACE}/later`);
  assert.equal((await list(page)).length, JOBS.length + 1);
  assert.equal(await page.evaluate(() => window.isTheSamePage), true, "the page was not loaded again");
  assertQuiet(page);
  await page.context().close();
});

test("text of a job that looks like markup is text", TIME, async () => {
  const page = await enter(TOKEN);
  await page.getByRole("link", { name: WITH_MARKUP }).click();
  await waitForText(page, "#phase", "Failed");
  for (const part of ["#explanation p", "#explanation pre", "#events", "#manifest"]) await waitForText(page, part, MARKUP);
  assert.equal(await page.evaluate(() => window.broken), undefined);
  assert.equal(await page.locator("main img, main script").count(), 0);
  await assertAccessible(page);
  assertQuiet(page);
  await page.context().close();
});

test("a page says that its token gives no right, and that it has expired", TIME, async () => {
  const page = await enter(TOKEN);
  await page.getByRole("link", { name: WITH_MARKUP }).click();
  await waitForText(page, "#phase", "Failed");
  await page.evaluate((job) => (location.hash = `#/${job}`), OTHER_JOB);
  await waitForText(page, "#connection", "does not give the right to see this, if it is there");
  assert.equal(await page.locator("#job").isVisible(), false);
  assert.equal(await page.locator("#phase").textContent(), "", "the phase of the job before is not that of this one");
  assert.equal(await page.title(), OTHER_JOB);

  await page.goBack();
  await waitForText(page, "#phase", "Failed");
  assert.equal(await page.locator("#connection").textContent(), "");
  await page.context().clearCookies();
  await page.getByRole("link", { name: "psjobs", exact: true }).click();
  await waitForText(page, "#connection", "Reload the page to give a new one");
  await page.reload();
  await page.fill("input", TOKEN);
  await Promise.all([page.waitForEvent("load"), page.keyboard.press("Enter")]);
  await page.getByRole("link", { name: WITH_MARKUP }).waitFor();
  await page.context().close();
});
