// Calls a function of web_peers.js in a new Chromium and prints what it returns, with the largest memory of the page's
// process in bytes, as JSON.
//
//     node web.mjs NODE_MODULES/x CHROMIUM ADDRESS FUNCTION '{"place": ...}'
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";

const [puppeteer, executablePath, address, name, given] = process.argv.slice(2);
const { launch } = createRequire(puppeteer)("puppeteer-core");
const timeout = 3_600_000;
const browser = await launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"], timeout, protocolTimeout: timeout });

// Peak resident bytes of the renderer that has taken most, of the processes below the browser
function memory() {
  const fields = (id) => Object.fromEntries(readFileSync(`/proc/${id}/status`, "utf8").split("\n").map((line) => line.split(":\t")));
  const parents = new Map();
  let most = 0;
  for (const id of readdirSync("/proc").filter((id) => /^\d+$/.test(id))) {
    try {
      parents.set(id, fields(id).PPid);
    } catch {} // it has ended
  }
  for (const id of parents.keys()) {
    let above = id;
    while (above && above !== String(browser.process().pid)) above = parents.get(above);
    if (!above || !readFileSync(`/proc/${id}/cmdline`, "utf8").includes("--type=renderer")) continue;
    most = Math.max(most, 1024 * parseInt(fields(id).VmHWM));
  }
  return most;
}

try {
  const page = await browser.newPage();
  page.on("console", (message) => console.error(message.text()));
  page.on("pageerror", (error) => console.error(String(error)));
  await page.goto(address, { timeout });
  const call = async (name, given) => (await import("/web_peers.js"))[name](given);
  const times = await page.evaluate(call, name, JSON.parse(given));
  console.log(JSON.stringify({ ...times, memory: memory() }));
} finally {
  await browser.close();
}
