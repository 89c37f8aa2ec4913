// Runs the model in a separate thread, so the page never stands still. Messages to it: {load}, {ask}, {stop}, {forget}.
import { loadModel } from "./diffbit/model.js";
import { runtimes } from "./diffbit/runtimes.js";
import { Template } from "./lib/jinja.js";
import { Tokenizer } from "./lib/tokenizers.min.mjs";

let model;
let messages = [];
let stop; // aborts the download or the answer

async function importOrt(provider) {
  const ort = await import(`./lib/ort.${provider}.min.mjs`);
  ort.env.wasm.wasmPaths = new URL("./lib/", import.meta.url).href;
  return ort;
}

async function load(signal) {
  const libraries = { Tokenizer, Template, runtimes: await runtimes(importOrt) };
  const began = performance.now();
  const onProgress = (progress) => postMessage({ progress });
  model = await loadModel(new URL("./model/", import.meta.url), libraries, { onProgress, signal });
  const { golden, ...manifest } = model.manifest;
  const { runtime, memory } = model;
  const chat = model.template !== null;
  postMessage({ ready: { manifest, runtime, memory, chat, think: thinks(), seconds: (performance.now() - began) / 1000 } });
}

// Whether the model thinks unless it is told; undefined if it cannot be told
function thinks() {
  const prompt = (think) => String(model.encodeChat([{ role: "user", content: "x" }], think));
  return model.canThink ? prompt() === prompt(true) : undefined;
}

async function ask({ text, options }, signal) {
  const turn = [...messages, { role: "user", content: text }];
  const chat = model.template !== null;
  let answer = "";
  for await (const more of chat ? model.chat(turn, { ...options, signal }) : model.generate(text, { ...options, signal })) {
    answer += more;
    postMessage({ text: more, tokens: model.last.ids.length, seconds: model.last.seconds });
  }
  if (chat && model.last.ids.length) messages = [...turn.slice(model.last.dropped), { role: "assistant", content: answer }];
  postMessage({ answer: { ...model.last, memory: model.memory } });
}

addEventListener("message", async ({ data }) => {
  if (data.stop) return stop?.abort();
  if (data.forget) return void (messages = []);
  stop = new AbortController();
  try {
    if (data.load) await load(stop.signal);
    if (data.ask) await ask(data.ask, stop.signal);
  } catch (error) {
    postMessage(stop.signal.aborted ? { stopped: true } : { error: error.message || String(error) });
  }
});
