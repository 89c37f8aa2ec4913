// Opens a site of `diffbit web` in Chromium, takes steps in it, and prints what the page wrote, as JSON.
//
//     node drive.mjs NODE_MODULES/x CHROMIUM '{"address": ..., "steps": [["ask", "def "]], ...}'
//
// adapter: none, or software: with WebGPU, on SwiftShader, which computes on the CPU; most: tokens of an answer; quota: bytes
// that the browser's storage takes; default: as it has it. Steps:
//   ["ask", TEXT]     types a text, sends it and waits for the end of the answer
//   ["stop", TEXT]    sends a text by Enter, and stops the answer (of at most 10 * most tokens) by Escape
//   ["pause", BYTES]  pauses the download once the page has this many
//   ["visit"]         opens the page in another tab, and closes this one
//   ["press", SELECTOR] clicks on an element
//   ["view", [WIDTH, HEIGHT, "light" or "dark"]] changes the window
//   ["picture", FILE] takes a screenshot
import { createRequire } from "node:module";

const ADAPTERS = { none: ["--disable-gpu"], software: ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"] };
const [puppeteer, executablePath, request] = process.argv.slice(2);
const { address, adapter = "none", most = 24, quota, steps = [] } = JSON.parse(request);
const { launch } = createRequire(puppeteer)("puppeteer-core");
const patience = { timeout: 300_000 }; // other tests may have all processors
const browser = await launch({ executablePath, args: ["--no-sandbox", ...ADAPTERS[adapter]], protocolTimeout: 300_000, ...patience });
const said = [], asked = [], answers = [];
let page;

async function visit() {
  const before = page;
  page = await browser.newPage();
  page.on("console", (message) => said.push(message.text()));
  page.on("pageerror", (error) => said.push(String(error)));
  page.on("request", (request) => asked.push(request.url()));
  await view([760, 560, "light"]);
  if (quota) await (await page.createCDPSession()).send("Storage.overrideQuotaForOrigin", { origin: new URL(address).origin, quotaSize: quota });
  await page.goto(address, patience);
  await before?.close();
}

async function view([width, height, scheme]) {
  await page.setViewport({ width, height });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
}

const until = (...phases) =>
  page.waitForFunction((phases) => phases.includes(document.body.dataset.phase), patience, [...phases, "paused"]);
const write = async (text, tokens = most) => {
  await page.evaluate(() => delete document.getElementById("talk").dataset.ids);
  await page.evaluate((tokens) => {
    document.getElementById("maxTokens").value = tokens;
    document.getElementById("temperature").value = 0; // the likeliest token, as the tests' other side
  }, tokens);
  await page.type("#text", text);
};
const answered = async () => {
  await page.waitForFunction(() => document.getElementById("talk").dataset.ids || document.querySelector("#state.wrong"), patience);
  answers.push(await page.evaluate(() => JSON.parse(document.getElementById("talk").dataset.ids ?? "null")));
};
const take = {
  async ask(text) {
    await write(text);
    await page.click("#send");
    await answered();
  },
  async stop(text) {
    await write(text, 10 * most);
    await page.evaluate(() => { // at the first word; a key from here may come after the end, where others have all processors
      const talk = document.getElementById("talk"), all = () => [...talk.querySelectorAll("span, .assistant")], before = all().length;
      const stop = () => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
      const seen = () => all().length > before && all().at(-1).textContent && (watch.disconnect(), stop());
      const watch = new MutationObserver(seen);
      watch.observe(talk, { childList: true, subtree: true, characterData: true });
    });
    await page.keyboard.press("Enter");
    await answered();
  },
  async pause(bytes) {
    await page.waitForFunction((bytes) => document.getElementById("progress").value >= bytes, patience, bytes);
    await page.click("#pause");
    await until();
  },
  async visit() {
    await visit();
    await until("ready");
  },
  press: (selector) => page.click(selector),
  view,
  picture: (path) => page.screenshot({ path }),
};

await visit();
if (steps[0]?.[0] !== "pause") await until("ready");
for (const [name, argument] of steps) await take[name](argument);
const text = (id) => page.evaluate((id) => document.getElementById(id).textContent, id);
const shown = { about: await text("about"), state: await text("state"), facts: await text("facts") };
const talk = await page.evaluate(() => document.getElementById("talk").innerText);
const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
console.log(JSON.stringify({ ...shown, talk, overflow, answers, said, asked }));
await browser.close();
