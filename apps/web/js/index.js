// Runs artifacts of `diffbit export` in a browser and in node. README.md has examples, index.d.ts the types.

import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";

import { inNode } from "./files.js";
import { loadModel } from "./model.js";
import { runtimes } from "./runtimes.js";

const importOrt = (provider) =>
  provider === "webgpu" ? import("onnxruntime-web/webgpu") : inNode ? import("onnxruntime-web") : import("onnxruntime-web/wasm");

export async function load(source, { device, threads, ...options } = {}) {
  return loadModel(source, { Tokenizer, Template, runtimes: await runtimes(importOrt, { device, threads }) }, options);
}
