// Runs an artifact's graph with onnxruntime-web, on the portable bodies of its operators: in WebAssembly or on WebGPU.
// model.js says what a runtime has to offer.

const ARRAYS = { float32: Float32Array, float16: Uint16Array, int8: Int8Array, uint8: Uint8Array };
const CHUNK = 256; // tokens per call, to limit memory
const ROOM = 512; // tokens that a cache on the GPU has room for at first

// graph: bytes of model.onnx; data(name) -> the bytes of a file of weights; dataNames: these files; ort: onnxruntime-web;
// provider: "wasm" or "webgpu"; chunk: tokens per call
export async function open({ graph, data, dataNames, manifest, ort, provider = "wasm", chunk = CHUNK }) {
  const buffers = manifest.cache.layers.flatMap((layer, index) =>
    layer.buffers.map((buffer) => ({ ...buffer, name: `${index}.${buffer.name}` })),
  );
  const gpu = provider === "webgpu";
  const externalData = [];
  for (const name of dataNames) externalData.push({ path: name.replace("onnx/", ""), data: await data(name) });
  const session = await ort.InferenceSession.create(graph, {
    executionProviders: gpu ? ["webgpu", "wasm"] : ["wasm"],
    enableMemPattern: false,
    logSeverityLevel: 3,
    externalData,
    preferredOutputLocation: Object.fromEntries(gpu ? buffers.map(({ name }) => [`present.${name}`, "gpu-buffer"]) : []),
  });
  const inPlace = gpu && buffers.every((buffer) => buffer.in_place === "always");
  return new OnnxRuntime({ ort, session, buffers, inPlace, chunk, context: manifest.context_length });
}

class OnnxRuntime {
  constructor(fields) {
    Object.assign(this, fields, { past: {}, capacity: 0 });
    this.reset();
  }

  reset() {
    this.length = 0;
    if (this.inPlace) return; // what is behind the tokens is not read
    this.dispose();
    for (const { name, dtype, shape } of this.buffers) {
      // "tokens" grows from 0; "tokens%512" is a ring of 512
      const dims = [1, ...shape.map((dim) => (typeof dim === "number" ? dim : Number(dim.split("%")[1] ?? 0)))];
      const size = dims.reduce((product, dim) => product * dim);
      this.past[name] = new this.ort.Tensor(dtype, new ARRAYS[dtype](size), dims);
    }
  }

  dispose() {
    for (const tensor of Object.values(this.past)) tensor.dispose();
    this.past = {};
  }

  async close() {
    this.dispose();
    await this.session.release();
  }

  async step(ids) {
    let logits;
    for (let at = 0; at < ids.length; at += this.chunk) logits = await this.run(ids.slice(at, at + this.chunk));
    return logits;
  }

  async run(ids) {
    const start = this.length;
    const total = start + ids.length;
    if (this.inPlace) await this.reserve(total);
    const int64 = (values, dims = [1, values.length]) =>
      new this.ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
    const feeds = {
      input_ids: int64(ids),
      attention_mask: int64(Array(total).fill(1)),
      position_ids: int64(Array.from(ids, (_, index) => start + index)),
    };
    if (this.session.inputNames.includes("logits_from")) feeds.logits_from = int64([ids.length - 1], [1]);
    for (const [name, tensor] of Object.entries(this.past)) feeds[`past_key_values.${name}`] = tensor;
    const fetches = { logits: null };
    for (const [name, tensor] of Object.entries(this.past)) fetches[`present.${name}`] = this.inPlace ? tensor : null;
    const outputs = await this.session.run(feeds, fetches);
    if (!this.inPlace) {
      this.dispose();
      for (const { name } of this.buffers) this.past[name] = outputs[`present.${name}`];
    }
    this.length = total;
    const { data, dims } = outputs.logits;
    return data.subarray((dims[1] - 1) * dims[2]);
  }

  truncate(length) {
    if (length === this.length || this.inPlace) {
      this.length = length;
      return true;
    }
    const rows = this.buffers.every(({ shape }) => shape[1] === "tokens");
    const onGpu = Object.values(this.past).some(({ location }) => location === "gpu-buffer");
    if (!rows || onGpu || length === 0) return false;
    for (const [name, { type, data, dims }] of Object.entries(this.past)) {
      const width = dims.slice(3).reduce((product, dim) => product * dim, 1);
      const kept = new data.constructor(dims[1] * length * width);
      for (let head = 0; head < dims[1]; head++) {
        const begin = head * dims[2] * width;
        kept.set(data.subarray(begin, begin + length * width), head * length * width);
      }
      this.past[name] = new this.ort.Tensor(type, kept, [1, dims[1], length, ...dims.slice(3)]);
    }
    this.length = length;
    return true;
  }

  // Make room on the GPU for `total` tokens in buffers that are past and present at once
  async reserve(total) {
    const { capacity } = this;
    if (total <= capacity) return;
    this.capacity = Math.min(Math.max(ROOM, 2 * capacity, total), this.context);
    const device = await this.ort.env.webgpu.device;
    const commands = device.createCommandEncoder();
    const before = this.past;
    this.past = {};
    for (const { name, dtype, shape } of this.buffers) {
      const dims = [1, ...shape.map((dim) => (typeof dim === "number" ? dim : this.capacity))];
      const row = dims[3] * ARRAYS[dtype].BYTES_PER_ELEMENT;
      const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
      const buffer = device.createBuffer({ size: dims[1] * dims[2] * row, usage });
      for (let head = 0; head < dims[1] && capacity; head++)
        commands.copyBufferToBuffer(before[name].gpuBuffer, head * capacity * row, buffer, head * dims[2] * row, capacity * row);
      const release = () => buffer.destroy();
      this.past[name] = this.ort.Tensor.fromGpuBuffer(buffer, { dataType: dtype, dims, dispose: release });
    }
    device.queue.submit([commands.finish()]);
    for (const tensor of Object.values(before)) tensor.dispose();
  }
}
