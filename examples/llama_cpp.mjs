// llama.cpp's side of side_by_side.py, by node-llama-cpp, whose package has llama.cpp compiled for each kind of processor.
//
//     node llama_cpp.mjs NODE_MODULES MODEL.gguf THREADS PROMPT_TOKENS NEW_TOKENS TEXT MOST
//
// Prints {"prefill", "decode" (tokens a second), "load_s", "memory" (bytes), "answer"}: of a prompt of random tokens and
// greedy ones after it, without flash attention, which is slower on CPUs; then the greedy answer to TEXT. The memory is
// the process's peak less what Node.js itself took before llama.cpp was loaded.
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

const [modules, file, threads, prompt, fresh, text, most] = process.argv.slice(2);
const before = process.resourceUsage().maxRSS * 1024;
const { getLlama, LlamaChatSession, LlamaLogLevel } = await import(
  pathToFileURL(resolve(modules, "node-llama-cpp/dist/index.js"))
);
const options = { gpu: false, build: "never", progressLogs: false, logLevel: LlamaLogLevel.error };
const llama = await getLlama({ ...options, maxThreads: Number(threads) });
const started = performance.now();
const model = await llama.loadModel({ modelPath: file });
const context = await model.createContext({ contextSize: 2048, threads: Number(threads), flashAttention: false });
const load_s = (performance.now() - started) / 1000;
const sequence = context.getSequence();

async function measure() {
  await sequence.clearHistory();
  const tokens = Array.from({ length: Number(prompt) }, (_, at) => 100 + ((at * 7919) % 40000));
  const begun = performance.now();
  let first = 0, count = 0;
  for await (const _ of sequence.evaluate(tokens, { temperature: 0, yieldEogToken: true })) {
    first ||= performance.now();
    if (++count == Number(fresh)) break;
  }
  return [tokens.length / ((first - begun) / 1000), (count - 1) / ((performance.now() - first) / 1000)];
}

await measure();
const [prefill, decode] = await measure();
const memory = process.resourceUsage().maxRSS * 1024 - before;
await sequence.clearHistory();
const session = new LlamaChatSession({ contextSequence: sequence });
const answer = await session.prompt(text, { maxTokens: Number(most), temperature: 0 });
console.log(JSON.stringify({ prefill, decode, load_s, memory, answer }));
process.exit(0);
