// A thread of the runtime: computes with the module's memory until the module tells it to end.
import { instantiate } from "./instance.js";

async function serve({ code, memory, stack, storage }, ready) {
  const fail = () => {
    throw new Error("a thread of the runtime failed");
  };
  const exports = await instantiate(code, memory, { fail });
  exports.__stack_pointer.value = stack;
  exports.__wasm_init_tls(storage);
  ready();
  exports.diffbit_serve();
}

if (globalThis.WorkerGlobalScope) {
  onmessage = ({ data }) => serve(data, () => postMessage("ready"));
} else {
  const { parentPort, workerData } = await import(/* webpackIgnore: true */ /* @vite-ignore */ "node:worker_threads");
  await serve(workerData, () => parentPort.postMessage("ready"));
}
