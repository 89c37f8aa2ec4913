// Opens a site of `diffbit web` in Chromium, types texts and prints what the page wrote, as JSON.
//
//     node drive.mjs NODE_MODULES/x CHROMIUM ADDRESS PICTURE|- none|software MOST TEXT...
//
// software: with WebGPU, on SwiftShader, which computes on the CPU.
import { createRequire } from "node:module";

const ADAPTERS = { none: ["--disable-gpu"], software: ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"] };
const [puppeteer, executablePath, address, picture, adapter, most, ...texts] = process.argv.slice(2);
const { launch } = createRequire(puppeteer)("puppeteer-core");
const patience = { timeout: 120_000 };  // other tests may have all processors
const browser = await launch({ executablePath, args: ["--no-sandbox", ...ADAPTERS[adapter]], ...patience });
const page = await browser.newPage();
const said = [], asked = [];
page.on("console", (message) => said.push(message.text()));
page.on("pageerror", (error) => said.push(String(error)));
page.on("request", (request) => asked.push(request.url()));
await page.setViewport({ width: 760, height: 560 });
await page.goto(address, patience);
const ready = () =>
  page.waitForFunction(
    () => document.getElementById("state").textContent.startsWith("Error") || (!document.getElementById("form").hidden && document.getElementById("send").textContent === "Send"),
    patience,
  );
await ready();
const answers = [];
await page.evaluate((most) => (document.getElementById("most").value = most), most);
for (const text of texts) {
  const before = await page.evaluate(() => document.getElementById("talk").dataset.ids);
  await page.type("#text", text);
  await page.click("#send");
  await page.waitForFunction(  // a short answer may be over before anyone looks
    (before) =>
      document.getElementById("send").textContent === "Stop" ||
      document.getElementById("talk").dataset.ids !== before ||
      document.getElementById("state").textContent.startsWith("Error"),
    patience,
    before,
  );
  await ready();
  answers.push(await page.evaluate(() => JSON.parse(document.getElementById("talk").dataset.ids ?? "null")));
}
if (picture !== "-") await page.screenshot({ path: picture });
const text = (id) => page.evaluate((id) => document.getElementById(id).innerText, id);
console.log(JSON.stringify({ about: await text("about"), state: await text("state"), talk: await text("talk"), answers, said, asked }));
await browser.close();
