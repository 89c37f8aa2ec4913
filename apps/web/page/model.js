// Runs an artifact in JavaScript: reads its files, tokenizes, and generates text with onnxruntime-web, on the portable
// bodies of its operators. It does not depend on the page: `Model.load` receives everything it needs.

const ARRAYS = { float32: Float32Array, float16: Uint16Array, int8: Int8Array, uint8: Uint8Array };
const CHUNK = 256; // prompt tokens per call, to limit memory
const ROOM = 512; // tokens that a cache on the GPU has room for at first
const CONTEXT = 8; // prompt tokens at the start of decoding: enough for any character or leading space

export class Model {
  // ort: onnxruntime-web; Tokenizer, Template: the classes of @huggingface/tokenizers and @huggingface/jinja;
  // provider: "wasm" or "webgpu"; chunk: prompt tokens per call;
  // read(name, entry): the bytes of an artifact's file, checked against its manifest entry {bytes, sha256}
  static async load({ ort, Tokenizer, Template, read, manifest, provider = "wasm", chunk = CHUNK }) {
    const model = new Model();
    const files = manifest.files;
    const bytes = (name) => read(name, files[name]);
    const json = async (name) => (files[name] ? JSON.parse(new TextDecoder().decode(await bytes(name))) : {});
    const config = await json("tokenizer_config.json");
    const special = { ...(await json("special_tokens_map.json")), ...config };
    model.generation = await json("generation_config.json");
    model.tokenizer = new Tokenizer(await json("tokenizer.json"), config);
    const source = files["chat_template.jinja"]
      ? new TextDecoder().decode(await bytes("chat_template.jinja"))
      : Array.isArray(config.chat_template)
        ? config.chat_template.find((one) => one.name === "default")?.template
        : config.chat_template;
    model.template = source ? new Template(source) : null;
    model.special = {};
    for (const name of ["bos_token", "eos_token", "unk_token", "pad_token"])
      if (special[name]) model.special[name] = special[name].content ?? special[name];
    model.manifest = manifest;
    model.ort = ort;
    const graph = files["model.onnx"] ? "model.onnx" : "onnx/model.onnx";
    const data = Object.keys(files).filter((name) => /^(model\.onnx\.data|onnx\/model\.onnx_data)(_\d+)?$/.test(name));
    model.buffers = manifest.cache.layers.flatMap((layer, index) =>
      layer.buffers.map((buffer) => ({ ...buffer, name: `${index}.${buffer.name}` })),
    );
    model.chunk = chunk;
    const gpu = provider === "webgpu";
    model.inPlace = gpu && model.buffers.every((buffer) => buffer.in_place === "always");
    const externalData = [];
    for (const name of data) externalData.push({ path: name.replace("onnx/", ""), data: await bytes(name) });
    model.session = await ort.InferenceSession.create(await bytes(graph), {
      executionProviders: provider === "wasm" ? ["wasm"] : [provider, "wasm"],
      enableMemPattern: false,
      logSeverityLevel: 3,
      externalData,
      preferredOutputLocation: Object.fromEntries(gpu ? model.buffers.map(({ name }) => [`present.${name}`, "gpu-buffer"]) : []),
    });
    const eos = model.special.eos_token === undefined ? undefined : model.tokenizer.token_to_id(model.special.eos_token);
    model.ends = new Set([...manifest.eos_token_ids, ...(eos === undefined ? [] : [eos])]);
    model.reset();
    return model;
  }

  reset() {
    this.ids = [];
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
    for (const tensor of Object.values(this.past ?? {})) tensor.dispose();
    this.past = {};
  }

  // Make room on the GPU for `total` tokens in buffers that are past and present at once
  async reserve(total) {
    const { capacity = 0 } = this;
    if (total <= capacity) return;
    this.capacity = Math.min(Math.max(ROOM, 2 * capacity, total), this.manifest.context_length);
    const device = await this.ort.env.webgpu.device;
    const commands = device.createCommandEncoder();
    const before = this.past ?? {};
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

  // The largest error of the golden logits, relative to their spread; it must be at most manifest.golden.tolerance
  async goldenError() {
    const { golden } = this.manifest;
    this.reset();
    let logits;
    for (let at = 0; at < golden.input_ids.length; at += this.chunk)
      logits = await this.append(golden.input_ids.slice(at, at + this.chunk));
    this.reset();
    return Math.max(...golden.token_ids.map((id, index) => Math.abs(logits[id] - golden.logits[index]))) / golden.spread;
  }

  // Append tokens to the cache; return the logits after the last one
  async append(ids) {
    const start = this.ids.length;
    const total = start + ids.length;
    if (this.inPlace) await this.reserve(total);
    const int64 = (values, dims = [1, values.length]) =>
      new this.ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
    const feeds = {
      input_ids: int64(ids),
      attention_mask: int64(Array(total).fill(1)),
      position_ids: int64(ids.map((_, index) => start + index)),
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
    this.ids = [...this.ids, ...ids];
    const { data, dims } = outputs.logits;
    return data.subarray((dims[1] - 1) * dims[2]);
  }

  // Keep the cached tokens that match the beginning of `ids` if the cache can be truncated there, else none
  reuse(ids) {
    let same = 0;
    while (same < this.ids.length && same < ids.length - 1 && this.ids[same] === ids[same]) same++;
    if (same === this.ids.length) return;
    if (this.inPlace) {
      this.ids = this.ids.slice(0, same);
      return;
    }
    const rows = this.buffers.every(({ shape }) => shape[1] === "tokens" && !shape.some((dim) => /\//.test(dim)));
    const onGpu = Object.values(this.past).some(({ location }) => location === "gpu-buffer");
    if (!rows || onGpu || same === 0) return this.reset();
    for (const [name, { type, data, dims }] of Object.entries(this.past)) {
      const width = dims.slice(3).reduce((product, dim) => product * dim, 1);
      const kept = new data.constructor(dims[1] * same * width);
      for (let head = 0; head < dims[1]; head++) {
        const begin = head * dims[2] * width;
        kept.set(data.subarray(begin, begin + same * width), head * same * width);
      }
      this.past[name] = new this.ort.Tensor(type, kept, [1, dims[1], same, ...dims.slice(3)]);
    }
    this.ids = this.ids.slice(0, same);
  }

  // Encode a conversation [{role, content}] as a prompt
  encodeChat(messages) {
    const text = this.template.render({ messages, add_generation_prompt: true, ...this.special });
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  encode(text) {
    const { ids } = this.tokenizer.encode(text);
    const bos = this.manifest.model.bos_token_id;
    return ids.length || bos == null ? ids : [bos];
  }

  decode(ids) {
    return this.tokenizer.decode(ids, { skip_special_tokens: true });
  }

  // Continue `prompt` (token ids). onText receives text that is final; generation ends when halted() returns true.
  // -> {text, ids, reason, promptSeconds, seconds}; `seconds` is the time of the tokens after the first
  async generate(prompt, { maxTokens = 512, onText = () => {}, halted = () => false, sampling = {} } = {}) {
    const capacity = this.manifest.context_length;
    if (!prompt.length) throw new Error("the prompt is empty");
    if (prompt.length >= capacity)
      throw new Error(`the text has ${prompt.length} tokens, but the model's context holds ${capacity}; start a new conversation`);
    const began = performance.now();
    this.reuse(prompt);
    let logits;
    while (this.ids.length < prompt.length) {
      logits = await this.append(prompt.slice(this.ids.length, this.ids.length + this.chunk));
      if (halted()) return { text: "", ids: [], reason: "halted", promptSeconds: 0, seconds: 0 };
    }
    const choose = sampler({ ...ownSampling(this.generation), ...sampling }, prompt.length);
    const context = prompt.slice(-CONTEXT);
    const before = this.decode(context).replace(/\ufffd+$/, "").length;
    const ids = [];
    let given = before;
    let first = 0;
    let reason;
    while (!reason) {
      const token = choose(logits, [...prompt, ...ids]);
      first ||= performance.now();
      ids.push(token);
      if (this.ends.has(token)) reason = "eos";
      else if (ids.length === maxTokens) reason = "length";
      else if (this.ids.length === capacity) reason = "context";
      else if (halted()) reason = "halted";
      const whole = this.decode([...context, ...ids]);
      const end = reason ? whole.length : whole.replace(/\ufffd+$/, "").length;
      if (end > given) onText(whole.slice(given, end));
      given = Math.max(given, end);
      if (!reason) logits = await this.append([token]);
    }
    const text = this.decode([...context, ...ids]).slice(before);
    return { text, ids, reason, promptSeconds: (first - began) / 1000, seconds: (performance.now() - first) / 1000 };
  }
}

// The settings of generation_config.json, as transformers reads them
function ownSampling({ do_sample, temperature = 1, top_k = 50, ...others }) {
  return { ...others, temperature: do_sample === true ? temperature : 0, top_k };
}

// (logits, ids so far) -> a token, by runtime/sampler.py's formulas in its order; the first `prompt` ids are the prompt
export function sampler({
  temperature = 0, top_k = 0, top_p = 1, min_p = 0, repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0,
  logit_bias = {}, random = Math.random,
}, prompt = 0) {
  return (logits, ids) => {
    const values = Float64Array.from(logits);
    for (const [id, bias] of Object.entries(logit_bias)) values[id] += bias;
    if (repetition_penalty !== 1)
      for (const id of new Set(ids))
        values[id] = values[id] > 0 ? values[id] / repetition_penalty : values[id] * repetition_penalty;
    if (frequency_penalty || presence_penalty) {
      const generated = ids.slice(prompt);
      for (const id of generated) values[id] -= frequency_penalty;
      for (const id of new Set(generated)) values[id] -= presence_penalty;
    }
    let best = 0;
    for (let id = 1; id < values.length; id++) if (values[id] > values[best]) best = id;
    if (!Number.isFinite(values[best])) throw new Error("the model returned logits that are not finite");
    if (!temperature) return best;
    let order = Array.from(values.keys()).sort((a, b) => values[b] - values[a]);
    if (top_k) order = order.slice(0, top_k);
    let shares = order.map((id) => Math.exp((values[id] - values[best]) / temperature));
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    const all = sum(shares);
    let mass = 0;
    const kept = top_p < 1 ? shares.findIndex((share) => (mass += share / all) >= top_p) + 1 || shares.length : shares.length;
    shares = shares.slice(0, kept).filter((share) => share >= min_p * shares[0]);
    let at = random() * sum(shares);
    return order[Math.max(0, shares.findIndex((share) => (at -= share) < 0))];
  };
}
