// The runtimes that a model may run on, the preferred one first. A runtime is {name, open}, where open({graph, data,
// dataNames, manifest}) returns what model.js calls its engine. A further runtime is a file and an entry here.

import { open as onnxruntime } from "./onnxruntime.js";
import { canShare, hasRelaxed } from "./wasm/instance.js";
import { open } from "./wasm/runtime.js";

// diffbit's kernels, in a module for the browser's instructions
const MODULE = hasRelaxed ? new URL("./wasm/runtime.relaxed.wasm", import.meta.url) : new URL("./wasm/runtime.wasm", import.meta.url);
const MOST_THREADS = 4; // a further one adds little, as memory does not get faster
const FEW = 31; // tokens per call that onnxruntime-web computes without the kernel described below

// device: "webgpu", "cpu" or undefined: the GPU if there is one; threads: of the CPU; importOrt("wasm" or "webgpu"): imports
// that build of onnxruntime-web
export async function runtimes(importOrt, { device, threads } = {}) {
  threads = canShare ? (threads ?? Math.min(MOST_THREADS, await processors())) : 1;
  if (![undefined, "cpu", "webgpu"].includes(device)) throw new RangeError(`device is ${device}, wanted cpu or webgpu`);
  const adapter = device === "cpu" ? null : await globalThis.navigator?.gpu?.requestAdapter().catch(() => null);
  if (device === "webgpu" && !adapter) throw new Error("There is no WebGPU adapter here. Leave out device, or pass cpu.");
  const onOrt = (provider, name, chunk) => ({
    name,
    async open(files) {
      const ort = await importOrt(provider);
      ort.env.wasm.numThreads = threads;
      return onnxruntime({ ...files, ort, provider, chunk });
    },
  });
  // GroupQueryAttention's kernel for 32 tokens and more reads 8 lanes of a subgroup (onnxruntime-web 1.30), whatever its size
  const chunk = adapter?.info?.subgroupMinSize < 8 ? FEW : undefined;
  const gpu = onOrt("webgpu", "GPU", chunk);
  const count = threads > 1 ? `${threads} threads` : "1 thread";
  // They refuse artifacts with operators that they lack; and a clone may lack the module
  const kernels = { name: count, open: async (files) => open({ ...files, wasm: MODULE, threads }) };
  const cpu = onOrt("wasm", `onnxruntime-web, ${count}`);
  return [...(adapter ? [gpu] : []), ...(device === "webgpu" ? [] : [kernels, cpu])];
}

async function processors() {
  if (globalThis.navigator?.hardwareConcurrency) return navigator.hardwareConcurrency;
  const { availableParallelism } = await import(/* webpackIgnore: true */ /* @vite-ignore */ "node:os");
  return availableParallelism();
}
