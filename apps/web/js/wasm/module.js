// The WebAssembly module (csrc/wasm) for JavaScript: tensors in its memory, and nodes that compute with them.
import { canShare, compile, instantiate, startThread } from "./instance.js";

// What the runtime cannot run, though another one may: an operator, a type, a kind of cache
export class Unsupported extends Error {
  name = "Unsupported";
}

const POINTER = { type: 0, rank: 4, data: 8, shape: 16 }; // members of OrtValue in csrc/graph/graph.h

const STACK = 512 << 10; // bytes of a thread's stack

export class Module {
  #threads = [];

  // wasm: its address or bytes; threads: at most one where threads cannot share memory; most: bytes to which memory may grow;
  // environment: variables that the C++ code sees
  static async load(wasm, { threads = 1, most = 1 << 30, environment } = {}) {
    const module = new Module();
    const shared = threads > 1 && canShare;
    const { code, memory } = await compile(wasm, { shared, most });
    module.memory = memory;
    const exports = await instantiate(code, memory, { environment, fail: (at) => module.#fail(at) });
    module.call = Object.fromEntries(Object.entries(exports).map(([name, value]) => [name.replace("diffbit_", ""), value]));
    exports._initialize();
    const start = () => {
      const stack = module.allocate(STACK) + STACK;
      return startThread({ code, memory, stack, storage: module.allocate(exports.__tls_size.value) });
    };
    if (shared) module.#threads = (await Promise.all(Array.from({ length: threads - 1 }, start))).filter(Boolean);
    return module;
  }

  get threads() {
    return 1 + this.#threads.length;
  }

  close() {
    this.call.end();
    for (const thread of this.#threads) thread.terminate();
    this.#threads = [];
  }

  #fail(at) {
    const bytes = new Uint8Array(this.memory.buffer, at);
    throw new Error(new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0))));
  }

  // Memory of `size` bytes; a view of it is good until the next call, after which memory may have moved
  allocate(size) {
    return this.call.allocate(size) >>> 0;
  }
  bytes(at, size) {
    return new Uint8Array(this.memory.buffer, at, size);
  }

  // The SHA-256 of bytes in memory, in hexadecimal digits
  sha256(at, size) {
    const digest = this.bytes(this.call.sha256(at, size) >>> 0, 32);
    return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  #texts = new Map();
  text(string) {
    if (!this.#texts.has(string)) {
      const bytes = new TextEncoder().encode(`${string}\0`);
      const at = this.allocate(bytes.length);
      this.bytes(at, bytes.length).set(bytes);
      this.#texts.set(string, at);
    }
    return this.#texts.get(string);
  }

  // A tensor: of a type and in memory that values share, or {shape, data} that its owner sets
  value({ type = 0, memory = 0, shape, data }) {
    const value = this.call.value(memory) >>> 0;
    new DataView(this.memory.buffer).setInt32(value + POINTER.type, type, true);
    if (shape) this.place(value, shape, data);
    return value;
  }
  place(value, shape, data) {
    const view = new DataView(this.memory.buffer);
    view.setInt32(value + POINTER.rank, shape.length, true);
    view.setUint32(value + POINTER.data, data, true);
    shape.forEach((size, i) => view.setBigInt64(value + POINTER.shape + 8 * i, BigInt(size), true));
  }
  type(value) {
    return new DataView(this.memory.buffer).getInt32(value + POINTER.type, true);
  }
  shape(value) {
    const view = new DataView(this.memory.buffer);
    const rank = view.getInt32(value + POINTER.rank, true);
    return Array.from({ length: rank }, (_, i) => Number(view.getBigInt64(value + POINTER.shape + 8 * i, true)));
  }
  data(value) {
    return new DataView(this.memory.buffer).getUint32(value + POINTER.data, true);
  }

  // A node; inputs and outputs are connected after `known` has said whether its output is a view of its input
  node({ domain, op, attributes }) {
    const node = this.call.node(this.text(domain), this.text(op)) >>> 0;
    for (const [name, value] of attributes) {
      if (typeof value === "bigint") this.call.integer(node, this.text(name), value);
      else if (Array.isArray(value)) for (const item of value) this.call.item(node, this.text(name), item);
      else if (value) this.call.number(node, this.text(name), value.float);
    }
    const label = `${domain && `${domain}.`}${op}`;
    const known = this.call.known(node);
    const unknown = () => new Unsupported(`the runtime for WebAssembly has no operator ${label}`);
    if (!known) throw unknown();
    return {
      node,
      isView: known === 2,
      connect: (inputs, outputs) => {
        for (const value of inputs) this.call.input(node, value);
        for (const value of outputs) this.call.output(node, value);
        try {
          if (!this.call.create(node)) throw unknown();
        } catch (error) {
          throw error instanceof Unsupported ? error : new Unsupported(`${label}: ${error.message}`);
        }
      },
    };
  }
}
