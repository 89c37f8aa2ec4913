// Opens a page in Chromium, calls the function that a module exports by default, and prints what it returns, as JSON.
//
//     node evaluate.mjs NODE_MODULES/x CHROMIUM ADDRESS MODULE '[ARGUMENT, ...]' [FLAG...]
import { createRequire } from "node:module";

const [puppeteer, executablePath, address, module, given, ...flags] = process.argv.slice(2);
const { launch } = createRequire(puppeteer)("puppeteer-core");
const timeout = 600_000; // other processes may have all processors
const browser = await launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", ...flags], timeout, protocolTimeout: timeout });
const page = await browser.newPage();
page.on("console", (message) => console.error(message.text()));
page.on("pageerror", (error) => console.error(String(error)));
await page.goto(address, { timeout });
const call = async (module, given) => (await import(module)).default(...given);
try {
  console.log(JSON.stringify(await page.evaluate(call, module, JSON.parse(given))));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
await browser.close();
