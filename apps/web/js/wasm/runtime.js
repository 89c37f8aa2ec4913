// Runs an artifact in WebAssembly: reads its graph, plans the memory, keeps the cache.
//
//     const model = await open({ graph, data, manifest, wasm });
//     const logits = await model.step([1, 2, 3]);
//
// An operator that csrc/graph does not have is refused when the graph is read, by an Unsupported that names it.
import { Module, Unsupported } from "./module.js";
import { BYTES, readGraph } from "./onnx.js";

export { Unsupported };

const CHUNK = 128; // prompt tokens per run, to limit memory
const ROOM = 128; // tokens that a cache has room for at first
const BLOCK = 32; // capacities are multiples of it: tokens enter low-bit caches in whole blocks
const INT64 = 7;

const product = (numbers) => numbers.reduce((all, one) => all * one, 1);

const SPARE = 256 << 20; // bytes of memory for all but weights and caches

// graph: the bytes of model.onnx; data: async (name, room) -> the bytes of a file of weights, which is asked for once;
// room(size) -> {bytes, sha256()}: memory of the runtime that may be filled and returned, so the file is in memory only once;
// manifest: diffbit.json; wasm: the module's address or bytes
export async function open({ graph, data, manifest, wasm, threads, environment }) {
  const read = readGraph(graph);
  const weights = read.initializers.reduce((sum, { length }) => sum + length, 0);
  const module = await Module.load(wasm, { threads, environment, most: weights + cacheBytes(manifest) + SPARE });
  try {
    return await loaded(module, new Model(module, read, manifest), data);
  } catch (error) {
    module.close(); // its threads hold its memory
    throw error;
  }
}

async function loaded(module, model, data) {
  const files = new Map();
  for (const tensor of model.weights) files.set(tensor.file, [...(files.get(tensor.file) ?? []), tensor]);
  for (const [name, tensors] of files) {
    let at;
    const room = (size) => {
      at = module.allocate(size);
      return { bytes: module.bytes(at, size), sha256: () => module.sha256(at, size) };
    };
    const bytes = await data(name, room);
    if (bytes.buffer !== module.memory.buffer) room(bytes.length).bytes.set(bytes);
    for (const { value, shape, offset, length } of tensors) {
      if (offset + length > bytes.length) throw new Error(`${name}: ends before its weights do`);
      module.place(value, shape, at + offset);
    }
  }
  return model;
}

// Of a full context
function cacheBytes({ cache, context_length }) {
  const tokens = Math.ceil(context_length / BLOCK) * BLOCK;
  const bytes = ({ dtype, shape }) => product(shape.map((size) => sizeOf(size, tokens))) * Number(dtype.match(/\d+$/)) / 8;
  return cache.layers.flatMap(({ buffers }) => buffers.map(bytes)).reduce((sum, one) => sum + one, 0);
}

class Model {
  #module;
  #values = new Map(); // name -> tensor
  #buffers; // of the cache
  #nodes; // an array of pointers in the module's memory
  #count;
  #inputs = {}; // name -> [tensor, where its int64 numbers are]
  #capacity = 0;
  #most;

  constructor(module, graph, manifest) {
    this.#module = module;
    this.#most = manifest.context_length;
    this.#buffers = manifest.cache.layers.flatMap((layer, index) =>
      layer.buffers.map(({ name, shape, in_place }) => ({ name: `${index}.${name}`, sizes: shape, in_place })),
    );
    this.weights = [];
    this.length = 0; // tokens in the cache
    const optional = (manifest.optional_inputs ?? []).map((name) => ({ name, type: INT64 })); // initializers in the file
    this.#read({ ...graph, inputs: [...graph.inputs, ...optional] });
    this.#plan(graph);
    this.reset();
  }

  // Inputs, weights and the cache as tensors
  #read({ inputs, initializers }) {
    const module = this.#module;
    const room = { input_ids: CHUNK, position_ids: CHUNK, attention_mask: this.#most, logits_from: 1 };
    for (const { name, type } of inputs) {
      if (name.startsWith("past_key_values.")) {
        const buffer = this.#buffers.find((one) => `past_key_values.${one.name}` === name);
        if (!buffer) throw new Error(`model.onnx: diffbit.json has no cache ${name}`);
        Object.assign(buffer, { bytes: BYTES[type], value: module.value({ type }) });
        this.#values.set(name, buffer.value);
        continue;
      }
      if (!(name in room) && initializers.some((tensor) => tensor.name === name)) continue; // it keeps its default
      if (!(name in room) || type !== INT64) throw new Unsupported(`the runtime for WebAssembly has no input ${name}`);
      const at = module.allocate(8 * room[name]);
      this.#inputs[name] = [module.value({ type }), at];
      this.#values.set(name, this.#inputs[name][0]);
      if (name === "attention_mask") this.#numbers(at, this.#most).fill(1n);
    }
    for (const tensor of initializers) {
      if (this.#values.has(tensor.name)) continue; // the default of an input
      const { type, shape } = tensor;
      const at = tensor.file === undefined ? module.allocate(tensor.length) : 0;
      const value = module.value({ type, shape, data: at });
      if (at) module.bytes(at, tensor.length).set(tensor.bytes);
      else this.weights.push({ ...tensor, value });
      this.#values.set(tensor.name, value);
    }
  }

  // Nodes, and memory for their outputs: one piece for several of which no two are needed at once
  #plan({ nodes, outputs }) {
    const module = this.#module;
    const made = nodes.map((node) => module.node(node));
    const owner = new Map(); // view -> the value whose memory it is
    const last = new Map(outputs.map(({ name }) => [name, Infinity])); // the last node that reads a value
    const root = (name) => owner.get(name) ?? name;
    nodes.forEach(({ inputs, outputs }, i) => {
      if (made[i].isView) owner.set(outputs[0], root(inputs[0]));
      for (const name of [...inputs, ...outputs]) last.set(root(name), Math.max(i, last.get(name) ?? 0, last.get(root(name)) ?? 0));
    });
    const free = [];
    const memory = new Map();
    nodes.forEach(({ domain, op, inputs, outputs }, i) => {
      for (const name of outputs) {
        if (!name || this.#values.has(name)) continue;
        const buffer = this.#buffers.find((one) => `present.${one.name}` === name);
        if (buffer) {
          if (domain !== "diffbit" || buffer.in_place === "never")
            throw new Unsupported(`the runtime for WebAssembly has no cache that ${op} computes: ${name}`);
          this.#values.set(name, buffer.value);
          continue;
        }
        if (!owner.has(name)) memory.set(name, free.pop() ?? module.call.memory());
        this.#values.set(name, module.value({ memory: memory.get(root(name)) ?? 0 }));
      }
      const value = (name) => {
        if (!name) return 0;
        if (!this.#values.has(name)) throw new Error(`model.onnx: nothing computes ${name}`);
        return this.#values.get(name);
      };
      made[i].connect(inputs.map(value), outputs.map(value));
      for (const [name, place] of memory)
        if (last.get(name) <= i) {
          free.push(place);
          memory.delete(name);
        }
    });
    this.#count = made.length;
    this.#nodes = module.allocate(4 * made.length);
    new Uint32Array(module.memory.buffer, this.#nodes, made.length).set(made.map(({ node }) => node));
  }

  #numbers(at, count) {
    return new BigInt64Array(this.#module.memory.buffer, at, count);
  }

  // Make room for `tokens` in the cache; what it holds moves
  #reserve(tokens) {
    if (tokens <= this.#capacity) return;
    const module = this.#module;
    const most = Math.ceil(this.#most / BLOCK) * BLOCK;
    let capacity = this.#capacity || Math.min(ROOM, most);
    while (capacity < tokens) capacity = Math.min(2 * capacity, most);
    for (const buffer of this.#buffers) {
      if (!buffer.value) throw new Error(`model.onnx: has no input past_key_values.${buffer.name}`);
      const axis = buffer.sizes.findIndex(grows);
      if (axis < 0 && buffer.shape) continue;
      const shape = buffer.sizes.map((size) => sizeOf(size, capacity));
      const bytes = product(shape) * buffer.bytes;
      const at = module.allocate(bytes);
      module.bytes(at, bytes).fill(0);
      if (buffer.shape) {
        const rows = product(shape.slice(0, axis));
        const [from, to] = [buffer.shape, shape].map((dims) => product(dims.slice(axis)) * buffer.bytes);
        for (let row = 0; row < rows; row++) module.bytes(at + row * to, from).set(module.bytes(buffer.at + row * from, from));
        module.call.free(buffer.at);
      }
      Object.assign(buffer, { shape, at, size: bytes });
      module.place(buffer.value, [1, ...shape], at);
    }
    this.#capacity = capacity;
  }

  reset() {
    this.length = 0;
    for (const { at, size, sizes } of this.#buffers) // states are read as a whole
      if (at && !sizes.some(grows)) this.#module.bytes(at, size).fill(0);
  }

  // Forget the tokens from `length` on; false where a cache cannot: where it holds blocks, rings or states
  truncate(length) {
    const can = this.#buffers.every(({ sizes }) => sizes.includes("tokens"));
    if (can) this.length = Math.min(length, this.length);
    return can;
  }

  // Append tokens; the logits after the last one
  async step(ids) {
    if (!ids.length) throw new Error("step needs at least one token");
    if (this.length + ids.length > this.#most)
      throw new Error(`the context holds ${this.#most} tokens, but ${this.length + ids.length} are needed`);
    this.#reserve(this.length + ids.length);
    for (let at = 0; at < ids.length; at += CHUNK) this.#run(ids.slice(at, at + CHUNK));
    const value = this.#values.get("logits");
    const shape = this.#module.shape(value);
    const width = shape[shape.length - 1];
    const end = this.#module.data(value) + 4 * product(shape);
    return new Float32Array(this.#module.memory.buffer, end - 4 * width, width).slice();
  }

  #run(ids) {
    const count = ids.length;
    const total = this.length + count;
    const set = (name, shape, numbers) => {
      if (!this.#inputs[name]) return;
      const [value, at] = this.#inputs[name];
      this.#module.place(value, shape, at);
      if (numbers) this.#numbers(at, numbers.length).set(numbers);
    };
    set("input_ids", [1, count], Array.from(ids, BigInt));
    set("position_ids", [1, count], Array.from(ids, (_, i) => BigInt(this.length + i)));
    set("attention_mask", [1, total]);
    set("logits_from", [1], [BigInt(count - 1)]);
    this.#module.call.run(this.#nodes, this.#count);
    this.length = total;
  }

  get memory() {
    return this.#module.memory.buffer.byteLength;
  }

  get threads() {
    return this.#module.threads;
  }

  close() {
    this.#module.close();
  }
}

// Whether a dimension of a cache's buffer grows with the tokens: "tokens", and not a ring's "tokens%512"
const grows = (size) => typeof size === "string" && !size.includes("%");

function sizeOf(size, tokens) {
  if (typeof size === "number") return size;
  return grows(size) ? tokens : Number(size.slice("tokens%".length));
}
