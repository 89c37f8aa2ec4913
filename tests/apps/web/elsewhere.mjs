// Opens a site of `diffbit web` in Firefox or WebKit, asks for answers, and prints what the page wrote, as JSON.
//
//     node elsewhere.mjs NODE_MODULES/x firefox|webkit PROGRAM '{"address": ..., "texts": ["def "], "most": 24}'
//
// PROGRAM: Firefox, which puppeteer drives; or MiniBrowser, of WebKitGTK, by WebKitWebDriver
import { spawn } from "node:child_process";
import { createServer } from "node:net";
import { createRequire } from "node:module";

const PATIENCE = 300_000; // other tests may have all processors
const [puppeteer, name, program, request] = process.argv.slice(2);
const { address, texts, most } = JSON.parse(request);

// Each returns {visit(address), evaluate(JavaScript of an expression), close()}
const OPEN = { firefox, webkit };

async function firefox() {
  const { launch } = createRequire(puppeteer)("puppeteer-core");
  const browser = await launch({ browser: "firefox", executablePath: program, timeout: PATIENCE, protocolTimeout: PATIENCE });
  const page = await browser.newPage();
  return { visit: (url) => page.goto(url, { timeout: PATIENCE }), evaluate: (text) => page.evaluate(text), close: () => browser.close() };
}

async function webkit() {
  const port = await new Promise((found) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => found(port));
    });
  });
  const driver = spawn("WebKitWebDriver", [`--port=${port}`], { stdio: "ignore" });
  const call = async (method, path, body) => {
    const answer = await fetch(`http://127.0.0.1:${port}${path}`, { method, body: body && JSON.stringify(body) });
    const { value } = await answer.json();
    if (!answer.ok) throw new Error(JSON.stringify(value));
    return value;
  };
  const options = { "webkitgtk:browserOptions": { binary: program, args: ["--automation"] } };
  const start = () => call("POST", "/session", { capabilities: { alwaysMatch: options } });
  for (let tries = 0; ; tries++) {
    try {
      const session = `/session/${(await start()).sessionId}`;
      return {
        visit: (url) => call("POST", `${session}/url`, { url }),
        evaluate: (text) => call("POST", `${session}/execute/sync`, { script: `return ${text}`, args: [] }),
        close: () => call("DELETE", session).finally(() => driver.kill()),
      };
    } catch (error) {
      if (tries === 60) throw error;
      await new Promise((done) => setTimeout(done, 500)); // it does not listen yet
    }
  }
}

const page = await OPEN[name]();
const until = async (condition) => {
  for (const begin = Date.now(); Date.now() < begin + PATIENCE; await new Promise((done) => setTimeout(done, 100))) {
    // a service worker loads the page anew, so nothing may be there for a while
    const found = await page.evaluate(`(() => { try { return ${condition} } catch { return null } })()`).catch(() => null);
    if (found) return found;
  }
  throw new Error(`${condition} is not so`);
};
try {
  await page.visit(address);
  await until(`document.body.dataset.phase === "ready"`);
  const answers = [];
  for (const text of texts) {
    const greedy = `document.getElementById("temperature").value = 0`;
    const fill = `document.getElementById("maxTokens").value = ${most}, ${greedy}, document.getElementById("text").value = ${JSON.stringify(text)}`;
    await page.evaluate(`(delete document.getElementById("talk").dataset.ids, ${fill}, document.getElementById("send").click(), 0)`);
    answers.push(JSON.parse(await until(`document.getElementById("talk").dataset.ids`)));
  }
  const text = (id) => page.evaluate(`document.getElementById("${id}").textContent`);
  console.log(JSON.stringify({ about: await text("about"), state: await text("state"), answers }));
} finally {
  await page.close();
}
