// Pages in Chromium, for every test that looks at one.

import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

// Opens the page, and collects what the browser complains about.
export async function open(browser, address, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 900 }, ...options });
  const page = await context.newPage();
  page.complaints = [];
  page.requests = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && page.complaints.push(message.text()));
  page.on("pageerror", (error) => page.complaints.push(String(error)));
  page.on("request", (request) => page.requests.push(request.url()));
  await page.goto(address);
  return page;
}

// Returns what breaks the rules of WCAG 2.1 AA and axe's own.
export async function violations(page) {
  // Through the debugger: the page's policy allows no script but its own.
  await page.evaluate(axe);
  const found = await page.evaluate(() => axe.run(document));
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" | ")}`);
}
