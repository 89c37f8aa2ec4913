// Opens a page with transformers.js in Chromium and prints the ids that it generates after each text, as JSON.
//
//     node transformers.mjs NODE_MODULES/x CHROMIUM ADDRESS MOST TEXT...
//
// ADDRESS serves the artifact at /model and node_modules at /lib.
import { createRequire } from "node:module";

const [puppeteer, executablePath, address, most, ...texts] = process.argv.slice(2);
const { launch } = createRequire(puppeteer)("puppeteer-core");
const patience = { timeout: 120_000 };  // other tests may have all processors
const browser = await launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"], ...patience });
const page = await browser.newPage();
page.on("console", (message) => console.error(message.text()));
await page.goto(`${address}index.html`, patience);
const answers = await page.evaluate(
  async (texts, most) => {
    const { AutoModelForCausalLM, AutoTokenizer, env } = await import("@huggingface/transformers");
    Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/", useBrowserCache: false });
    Object.assign(env.backends.onnx.wasm, { wasmPaths: "/lib/onnxruntime-web/dist/", numThreads: 1 });
    const tokenizer = await AutoTokenizer.from_pretrained("model");
    const model = await AutoModelForCausalLM.from_pretrained("model");
    const answers = [];
    for (const text of texts) {
      const inputs = await tokenizer(text);
      const found = await model.generate({ ...inputs, max_new_tokens: most, do_sample: false });
      answers.push(found.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number));
    }
    return answers;
  },
  texts,
  Number(most),
);
console.log(JSON.stringify(answers));
await browser.close();
