// Greedy tokens of an artifact: node greedy.mjs FOLDER MODULE THREADS COUNT BLOCK ID... -> {ids, logits, again, memory, error, seconds} as
// JSON; BLOCK: prompt tokens a step; `again`: whether a second run after reset, and one after truncate, give the same bits;
// `left`: threads that three loads without weights left behind.
import { readdirSync, readFileSync } from "node:fs";
import { open } from "../../../apps/web/js/wasm/runtime.js";

const [folder, wasm, threads, count, block, ...words] = process.argv.slice(2);
const prompt = words.map(Number);
const read = (name) => readFileSync(`${folder}/${name}`);

const tasks = () => readdirSync("/proc/self/task").length; // threads of this process

const largest = (logits) => logits.reduce((best, value, id) => (value > logits[best] ? id : best), 0);

async function generate(model, ids) {
  let logits;
  for (let at = 0; at < ids.length; at += Number(block)) logits = await model.step(Int32Array.from(ids.slice(at, at + Number(block))));
  const of = [logits];
  const tokens = [];
  const began = performance.now();
  while (tokens.length < Number(count)) {
    tokens.push(largest(logits));
    if (tokens.length < Number(count)) of.push((logits = await model.step([tokens.at(-1)])));
  }
  return { ids: tokens, logits: of.map((one) => Array.from(one)), seconds: (performance.now() - began) / 1000 };
}

const same = (a, b) => JSON.stringify([a.ids, a.logits]) === JSON.stringify([b.ids, b.logits]);

try {
  const manifest = JSON.parse(read("diffbit.json"));
  const artifact = { graph: read("model.onnx"), data: read, manifest, wasm: readFileSync(wasm), threads: Number(threads) };
  const model = await open(artifact);
  const first = await generate(model, prompt);
  model.reset();
  const again = [same(first, await generate(model, prompt))];
  if (model.truncate(prompt.length - 1)) {
    const last = { ...first, ...(await generate(model, prompt.slice(-1))) };
    again.push(last.ids.join() === first.ids.join());
  }
  const running = tasks();
  for (let i = 0; i < 3; i++) await open({ ...artifact, data: () => Promise.reject(new Error("paused")) }).catch(() => {});
  for (let i = 0; i < 200 && tasks() > running; i++) await new Promise((done) => setTimeout(done, 10));
  const left = tasks() - running;
  console.log(JSON.stringify({ ...first, again, left, memory: model.memory, threads: model.threads }));
  model.close();
} catch (error) {
  console.log(JSON.stringify({ error: `${error.name}: ${error.message}` }));
}
