// Opens a page of `diffbit show` in Chromium, presses keys, and prints what the page then shows, as JSON.
//
//     node drive.mjs NODE_MODULES/x CHROMIUM ADDRESS
import { createRequire } from "node:module";

const [puppeteer, executablePath, address] = process.argv.slice(2);
const { launch } = createRequire(puppeteer)("puppeteer-core");
const browser = await launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"], timeout: 120_000 });
const page = await browser.newPage();
const said = [], asked = [];
page.on("console", (message) => said.push(message.text()));
page.on("pageerror", (error) => said.push(String(error)));
page.on("request", (request) => asked.push(request.url()));
await page.setViewport({ width: 1280, height: 900 });
await page.goto(address, { timeout: 120_000 });

const look = () =>
  page.evaluate(() => {
    const text = (element) => element.textContent;
    const model = document.getElementById("model-1");
    const [, layer, head] = model.querySelector(".head span:last-child").textContent.match(/layer (\d+).*head (\d+)/);
    const figures = [...model.querySelectorAll("figure")];
    return {
      status: text(document.getElementById("status")),
      outputs: [...document.querySelectorAll("output")].map(text),
      layer: Number(layer),
      head: Number(head),
      operator: model.querySelector(".operator").firstChild.textContent,
      next: [...model.querySelectorAll(".next code")].map(text),
      weights: figures.map((figure) => [...figure.querySelectorAll("[data-token]")].map((token) => Number(token.title.split(": ").at(-1)))),
      answer: figures.map((figure) => Number.parseFloat(figure.querySelectorAll(".shares > :nth-child(3n)")[1].textContent)),
    };
  });
const press = async (id, ...keys) => {
  await page.evaluate((id) => (id ? document.getElementById(id).focus() : document.activeElement.blur()), id);
  for (const key of keys) await page.keyboard.press(key);
  return look();
};
const begin = await look();
const rounded = await press("weights", "ArrowRight", "ArrowRight");
const cache = await press("kv", "ArrowRight");
const moved = await press("", begin.layer ? "ArrowUp" : "ArrowDown", "ArrowRight");
const widths = {};
for (const width of [1280, 400, 320]) {
  await page.setViewport({ width, height: 900 });
  widths[width] = await page.evaluate(() => document.documentElement.scrollWidth);
}
const count = (name) => page.evaluate((name) => document.querySelectorAll(name).length, name);
console.log(JSON.stringify({ begin, rounded, cache, moved, widths, said, asked, title: await page.title(), scripts: await count("script"), images: await count("img") }));
await browser.close();
