// Runs the model in a separate thread, so the page stays responsive. Messages to it: {load}, {ask}, {halt}, {forget}.
import { Template } from "./lib/jinja.js";
import { Tokenizer } from "./lib/tokenizers.min.mjs";
import { Model } from "./model.js";

const FOLDER = "model/";
const FEW = 31; // prompt tokens per call that onnxruntime-web computes without the kernel described below
const threads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
let model;
let messages = [];
let halted = false;

// Return the bytes of a file from this site's cache or the server; throw if they do not match the manifest
async function read(name, entry) {
  const key = `${FOLDER}${name}?sha256=${entry.sha256}`;
  const cache = await caches.open("diffbit").catch(() => undefined); // private windows have no cache
  const kept = await cache?.match(key);
  const bytes = kept ? new Uint8Array(await kept.arrayBuffer()) : await download(name, entry);
  const found = Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  if (found !== entry.sha256) {
    await cache?.delete(key);
    throw new Error(`${name}: its hash is ${found.slice(0, 12)}…, the manifest says ${entry.sha256.slice(0, 12)}…`);
  }
  if (!kept) await cache?.put(key, new Response(bytes)).catch(() => undefined); // without space in the cache, the next visit fetches it again
  return bytes;
}

async function download(name, { bytes: size }) {
  const answer = await fetch(FOLDER + name);
  if (!answer.ok) throw new Error(`${name}: the server answered ${answer.status}`);
  const bytes = new Uint8Array(size);
  let length = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    if (length + value.length > size) throw new Error(`${name}: is longer than the ${size} bytes of the manifest`);
    bytes.set(value, length);
    length += value.length;
    postMessage({ progress: { name, length, size } });
  }
  if (length !== size) throw new Error(`${name}: has ${length} bytes, the manifest says ${size}`);
  return bytes;
}

// Load the model on the GPU if the browser has one that computes the golden logits, else in WebAssembly
async function load() {
  const manifest = await (await fetch(`${FOLDER}diffbit.json`)).json();
  const { tolerance } = manifest.golden;
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  // GroupQueryAttention's kernel for 32 tokens and more reads 8 lanes of a subgroup (onnxruntime-web 1.30), whatever its size
  const chunk = adapter?.info?.subgroupMinSize < 8 ? FEW : undefined;
  let error, provider, failed;
  for (provider of adapter ? ["webgpu", "wasm"] : ["wasm"]) {
    try {
      const ort = await import(`./lib/ort.${provider}.min.mjs`);
      ort.env.wasm.numThreads = threads;
      ort.env.wasm.wasmPaths = new URL("./lib/", import.meta.url).href;
      model = await Model.load({ ort, Tokenizer, Template, read, manifest, provider, chunk: provider === "webgpu" ? chunk : undefined });
      error = await model.goldenError();
      if (error <= tolerance) break;
      failed = new Error(`the self-test failed: the error of the logits is ${error}, wanted at most ${tolerance}`);
    } catch (thrown) {
      failed = thrown;
    }
    model = undefined;
  }
  if (!model) throw failed;
  const { name, files, scheme, sha256, context_length } = manifest;
  const bytes = Object.values(files).reduce((sum, file) => sum + file.bytes, 0);
  const on = provider === "webgpu" ? "GPU" : `${threads} ${threads > 1 ? "threads" : "thread"}`;
  postMessage({ ready: { name, bytes, scheme, sha256, context_length, on, error, chat: model.template !== null } });
}

async function ask({ text, options }) {
  halted = false;
  const turn = [...messages, { role: "user", content: text }];
  const prompt = model.template ? model.encodeChat(turn) : model.encode(text);
  const answer = await model.generate(prompt, {
    ...options,
    onText: (more) => postMessage({ text: more }),
    halted: () => halted,
  });
  if (model.template && answer.ids.length) messages = [...turn, { role: "assistant", content: answer.text }];
  postMessage({ answer: { ...answer, prompt: prompt.length } });
}

addEventListener("message", async ({ data }) => {
  try {
    if (data.halt) halted = true;
    if (data.forget) messages = [];
    if (data.load) await load();
    if (data.ask) await ask(data.ask);
  } catch (error) {
    postMessage({ error: error.message ?? String(error) });
  }
});
