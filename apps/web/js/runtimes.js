// The runtimes that a model may run on, the preferred one first. A runtime is {name, open}, where open({graph, data,
// dataNames, manifest}) returns what model.js calls its engine. A further runtime is a file and an entry here.

import { open as onnxruntime } from "./onnxruntime.js";
import { open } from "./wasm/runtime.js";

// diffbit's kernels. They refuse artifacts with operators that they lack; and a clone may lack the module
const KERNELS = {
  name: "1 thread",
  open: async (files) => open({ ...files, wasm: new URL("./wasm/runtime.wasm", import.meta.url) }),
};
const FEW = 31; // tokens per call that onnxruntime-web computes without the kernel described below

// device: "webgpu", "cpu" or undefined: the GPU if there is one; threads: of the CPU; importOrt("wasm" or "webgpu"): imports
// that build of onnxruntime-web
export async function runtimes(importOrt, { device, threads = 1 } = {}) {
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
  const cpu = onOrt("wasm", `onnxruntime-web, ${threads > 1 ? `${threads} threads` : "1 thread"}`);
  return [...(adapter ? [gpu] : []), ...(device === "webgpu" ? [] : [KERNELS, cpu])];
}
