// Instances of the WebAssembly module: what it imports, and its memory, which threads share.

const inNode = typeof process !== "undefined" && Boolean(process.versions?.node);
const MEMORY = [3, ..."env", 6, ..."memory", 2, 3].map((one) => (typeof one === "string" ? one.charCodeAt(0) : one)); // its import

// Whether there is i32x4.relaxed_dot_i8x16_i7x16_add_s: a function that has one
const splat = [0x41, 1, 0xfd, 15];
export const hasRelaxed = WebAssembly.validate(
  new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 19, 1, 17, 0, ...splat, ...splat, ...splat, 0xfd, 0x93, 2, 11]),
);

// Whether threads may share memory here; WebKitGTK has pages that are isolated and no memory to share
export const canShare = inNode || Boolean(globalThis.crossOriginIsolated && globalThis.SharedArrayBuffer);

async function bytesOf(wasm) {
  if (wasm instanceof ArrayBuffer || ArrayBuffer.isView(wasm)) return new Uint8Array(wasm.buffer ?? wasm, wasm.byteOffset, wasm.byteLength);
  if (String(wasm).startsWith("file:")) {
    const { readFile } = await import(/* webpackIgnore: true */ /* @vite-ignore */ "node:fs/promises"); // fetch in Node.js does not read files
    return readFile(new URL(wasm));
  }
  const answer = await fetch(wasm);
  if (!answer.ok) throw new Error(`${wasm}: the server answered ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

// A module, from its address or bytes, and memory for it that may grow to `most` bytes. The module asks for shared memory,
// which browsers give to pages that are isolated; for one thread the same code runs with other memory
export async function compile(wasm, { shared, most }) {
  const bytes = (await bytesOf(wasm)).slice();
  const flags = bytes.findIndex((_, i) => MEMORY.every((byte, j) => bytes[i + j] === byte)) + MEMORY.length - 1;
  if (flags < MEMORY.length) throw new Error(`${wasm} is not the runtime's module`);
  const HAS_MAXIMUM = 1;
  if (!shared) bytes[flags] = HAS_MAXIMUM;
  let initial = 0;
  for (let at = flags + 1, shift = 0; ; at++, shift += 7) {
    initial |= (bytes[at] & 127) << shift;
    if (bytes[at] < 128) break;
  }
  const maximum = Math.min(65535, initial + Math.ceil(most / 65536));
  return { code: await WebAssembly.compile(bytes), memory: new WebAssembly.Memory({ initial, maximum, shared }) };
}

// environment: variables that the C++ code sees; fail(address of a text): throws the Error
export async function instantiate(code, memory, { environment = {}, fail }) {
  const variables = Object.entries(environment).map(([name, value]) => new TextEncoder().encode(`${name}=${value}\0`));
  const write = (at, ...numbers) => new Uint32Array(memory.buffer, at, numbers.length).set(numbers);
  const system = {
    environ_sizes_get(count, bytes) {
      write(count, variables.length);
      write(bytes, variables.reduce((sum, one) => sum + one.length, 0));
      return 0;
    },
    environ_get(pointers, bytes) {
      for (const [i, one] of variables.entries()) {
        write(pointers + 4 * i, bytes);
        new Uint8Array(memory.buffer).set(one, bytes);
        bytes += one.length;
      }
      return 0;
    },
    proc_exit(code) {
      throw new Error(`the runtime ended with ${code}`);
    },
  };
  const refuse = () => 52; // ENOSYS: there are no files
  const { exports } = await WebAssembly.instantiate(code, {
    env: { memory, fail },
    wasi_snapshot_preview1: new Proxy(system, { get: (all, name) => all[name] ?? refuse }),
  });
  return exports;
}

// A worker that runs thread.js, once it is ready; null where it cannot start
export async function startThread(message) {
  if (!inNode) {
    const worker = new Worker(new URL("./thread.js", import.meta.url), { type: "module" }); // as bundlers know it
    const ready = new Promise((done) => Object.assign(worker, { onmessage: () => done(worker), onerror: () => done(null) }));
    worker.postMessage(message);
    return ready;
  }
  const { Worker: NodeWorker } = await import(/* webpackIgnore: true */ /* @vite-ignore */ "node:worker_threads");
  const worker = new NodeWorker(new URL("./thread.js", import.meta.url), { workerData: message, execArgv: [] });
  const ready = await new Promise((done) => worker.once("message", () => done(worker)).on("error", () => done(null)));
  worker.unref(); // it does not keep the process from ending
  return ready;
}
