// Does onnxruntime-web (WASM) compute an artifact's golden logits, from the same files and the operators' bodies alone?
//
//     npm install onnxruntime-web && node benchmarks/web_check.mjs out/demo/diff_v1-onnx
//
// Run it where node_modules lies (it may be a folder of its own: copy this file there). Prints one JSON row; exit code 1
// if the logits are off. The same calls work in a page, with the files fetched instead of read.
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web";
const folder = process.argv[2];
const manifest = JSON.parse(readFileSync(`${folder}/diffbit.json`, "utf8"));
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(`${folder}/model.onnx`), {
  executionProviders: ["wasm"],
  externalData: [{ path: "model.onnx.data", data: readFileSync(`${folder}/model.onnx.data`) }],
});
const { golden, cache } = manifest;
const int64 = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
const count = golden.input_ids.length;
const feeds = { input_ids: int64(golden.input_ids), attention_mask: int64(Array(count).fill(1)), position_ids: int64([...Array(count).keys()]) };
const arrays = { float32: Float32Array, float16: Uint16Array, int8: Int8Array, uint8: Uint8Array };
for (let layer = 0; layer < cache.num_layers; layer++)
  for (const { name, dtype, shape } of cache.buffers) {
    // an empty cache: no tokens, and room for the recent ones of a low-bit cache
    const dims = [1, ...shape.map((dim) => (typeof dim === "number" ? dim : 0))];
    const size = dims.reduce((product, dim) => product * dim);
    feeds[`past_key_values.${layer}.${name}`] = new ort.Tensor(dtype, new arrays[dtype](size), dims);
  }
const { logits } = await session.run(feeds);
const vocab = logits.dims[2], last = logits.data.subarray((count - 1) * vocab);
const error = Math.max(...golden.token_ids.map((id, i) => Math.abs(last[id] - golden.logits[i]))) / golden.spread;
const passed = error <= golden.tolerance; // false for NaN too
console.log(JSON.stringify({ artifact: manifest.name, error, tolerance: golden.tolerance, passed }));
process.exit(passed ? 0 : 1);
