// A language model: tokenizer, chat template, sampling and generation, over an engine that computes logits.
//
// An engine is what a runtime's open() returns:
//
//     await step(ids)   appends tokens to the cache and returns the logits [V] after the last one
//     reset()           forgets all tokens
//     truncate(length)  keeps the first `length` tokens; false if it cannot
//     memory            the bytes that it has taken, or undefined if it does not know
//     close()           frees them; an engine may lack it

import { openFiles } from "./files.js";
import { LoopGuard } from "./loops.js";
import { Sampler, samplingOf } from "./sampler.js";
import { TextStream } from "./text.js";
import { switchesOf, thinkingVariables } from "./thinking.js";

const MAX_TOKENS = 512;
const CHUNK = 256; // tokens of a prompt after which generation can be stopped
const ROOM = 4; // 1 / ROOM of the context, or maxTokens if that is less, stays free for an answer
const SPECIAL = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

// Let other tasks run, such as messages that ask to stop
const turn = globalThis.setImmediate
  ? () => new Promise((done) => setImmediate(done))
  : () =>
      new Promise((done) => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => (port1.close(), done());
        port2.postMessage(0);
      });

// source, onProgress and signal: as openFiles takes them; Tokenizer, Template: the classes of @huggingface/tokenizers and
// @huggingface/jinja; runtimes: of runtimes.js. The first of them that computes the manifest's golden logits runs the model
export async function loadModel(source, { Tokenizer, Template, runtimes }, { onProgress, signal } = {}) {
  const files = await openFiles(source, { onProgress, signal });
  const { manifest } = files;
  if (!files.has("tokenizer.json")) throw new Error("The artifact has no tokenizer.json. Export the model with --tokenizer.");
  const data = (name, room) => files.read(files.has(name) ? name : `onnx/${name}`, room); // as the graph names them
  const graph = await files.read(files.graph);
  const texts = readTexts(files, Tokenizer, Template); // while the weights come
  texts.catch(() => {}); // awaited below
  let failure;
  for (const { name, open } of runtimes) {
    let engine;
    try {
      engine = await open({ graph, data, dataNames: files.data, manifest });
      const model = new Model({ ...(await texts), manifest, engine, runtime: name });
      const error = await model.goldenError();
      if (error <= manifest.golden.tolerance) return model;
      throw new Error(`The self-test failed (${name}): the error of the logits is ${error}, at most ${manifest.golden.tolerance} is right.`);
    } catch (error) {
      await engine?.close?.();
      await texts; // if they are what failed, no other runtime will do
      if (signal?.aborted) throw error;
      failure = error;
    }
  }
  throw failure;
}

async function readTexts(files, Tokenizer, Template) {
  const config = await files.json("tokenizer_config.json");
  const texts = {
    special: specialTokens({ ...(await files.json("special_tokens_map.json")), ...config }),
    generation: await files.json("generation_config.json"),
    tokenizer: new Tokenizer(await files.json("tokenizer.json"), config),
  };
  const template = files.has("chat_template.jinja")
    ? new TextDecoder().decode(await files.read("chat_template.jinja"))
    : Array.isArray(config.chat_template)
      ? config.chat_template.find(({ name }) => name === "default")?.template
      : config.chat_template;
  return { ...texts, template: template ? new Template(template) : null, templateSource: template ?? "" };
}

function specialTokens(config) {
  const named = SPECIAL.map((name) => [name, config[name]?.content ?? config[name]]);
  return Object.fromEntries(named.filter(([, token]) => typeof token === "string"));
}

export class Model {
  constructor(fields) {
    Object.assign(this, fields); // manifest, tokenizer, template, templateSource, special, generation, engine, runtime
    this.switches = this.template ? switchesOf(this.template) : [];
    this.ids = []; // the tokens in the engine's cache
    this.busy = false;
    this.last = null; // the counts and times of the last generation, or of the one under way
    const eos = this.special.eos_token === undefined ? undefined : this.tokenizer.token_to_id(this.special.eos_token);
    this.ends = new Set(this.manifest.eos_token_ids);
    this.chatEnds = new Set([...this.ends, ...(eos === undefined ? [] : [eos])]);
  }

  get memory() {
    return this.engine.memory;
  }

  // Whether `think` chooses if the model thinks before it answers
  get canThink() {
    return this.switches.length > 0;
  }

  async close() {
    await this.engine.close?.();
  }

  // The largest error of the golden logits, relative to their spread
  async goldenError() {
    const { golden } = this.manifest;
    this.engine.reset();
    const logits = await this.engine.step(golden.input_ids);
    const errors = golden.token_ids.map((id, index) => Math.abs(logits[id] - golden.logits[index]));
    this.engine.reset();
    return errors.every(Number.isFinite) ? Math.max(...errors) / golden.spread : NaN;
  }

  encode(text) {
    const { ids } = this.tokenizer.encode(text);
    const bos = this.manifest.model.bos_token_id;
    return ids.length || bos == null ? ids : [bos];
  }

  decode(ids) {
    return this.tokenizer.decode(ids, { skip_special_tokens: true });
  }

  // The prompt of a conversation [{role, content}]. think: whether the model thinks before it answers; undefined: as the
  // template has it
  encodeChat(messages, think) {
    if (!this.template) throw new Error("The model has no chat template: use generate to continue a text.");
    const thinking = thinkingVariables(think, this.switches, this.templateSource);
    let text;
    try {
      text = this.template.render({ messages, add_generation_prompt: true, ...this.special, ...thinking });
    } catch (error) {
      throw new Error(`The model's chat template refuses this conversation (${error.message}).`);
    }
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  // Continue a text, or token ids as they are: an async iterator of text that is final, whole characters only. options:
  // maxTokens, signal (an AbortSignal, which ends the text), allowLoops (else a text that loops ends), and those of
  // sampler.js; the model's generation_config.json has the defaults
  async *generate(prompt, options = {}) {
    yield* this.run(typeof prompt === "string" ? this.encode(prompt) : Array.from(prompt), options, this.ends);
  }

  // Answer a conversation [{role, content}], as generate does; think: as encodeChat takes it. If it leaves no room for an
  // answer, its oldest turns are left out until half of the context is free, as diffbit chat does
  async *chat(messages, { think, ...options } = {}) {
    const { prompt, dropped } = this.fit(messages, options.maxTokens ?? MAX_TOKENS, think);
    yield* this.run(prompt, options, this.chatEnds, dropped);
  }

  fit(messages, maxTokens, think) {
    const capacity = this.manifest.context_length;
    const first = Math.max(0, messages.findIndex(({ role }) => role !== "system"));
    const [system, turns] = [messages.slice(0, first), messages.slice(first)];
    const encoded = (begin) => this.encodeChat([...system, ...turns.slice(begin)], think);
    const prompt = encoded(0);
    if (prompt.length + Math.min(maxTokens, Math.floor(capacity / ROOM)) <= capacity) return { prompt, dropped: 0 };
    const begins = [...turns.keys()].filter((index) => turns[index].role === "user");
    if (!begins.length) return { prompt, dropped: 0 };
    const dropped = begins.slice(1).find((begin) => 2 * encoded(begin).length <= capacity) ?? begins.at(-1);
    return { prompt: encoded(dropped), dropped };
  }

  async *run(prompt, { maxTokens = MAX_TOKENS, signal, allowLoops = false, ...sampling }, ends, dropped = 0) {
    const capacity = this.manifest.context_length;
    if (!(Number.isInteger(maxTokens) && maxTokens > 0)) throw new RangeError(`maxTokens is ${maxTokens}, wanted at least 1`);
    if (!prompt.length) throw new Error("The prompt is empty, and the model has no bos token to start from.");
    if (prompt.length > capacity)
      throw new Error(`The text has ${prompt.length} tokens, but the model's context holds ${capacity}. Shorten it.`);
    const sampler = new Sampler(samplingOf(this.generation, sampling), prompt.length);
    if (this.busy) throw new Error("The model is generating another text: wait until it ends, or load the model twice.");
    this.busy = true;
    const began = performance.now();
    const text = new TextStream((ids) => this.decode(ids), prompt);
    const guard = allowLoops ? null : new LoopGuard((ids) => this.decode(ids));
    const ids = [...prompt];
    const last = { ids: [], reason: "interrupted", promptTokens: prompt.length, cachedTokens: 0, promptSeconds: 0, seconds: 0, dropped };
    let first;
    let logits;
    this.last = last;
    try {
      this.reuse(prompt);
      last.cachedTokens = this.ids.length;
      while (this.ids.length < prompt.length) {
        await turn();
        if (signal?.aborted) return;
        logits = await this.append(prompt.slice(this.ids.length, this.ids.length + CHUNK));
      }
      for (;;) {
        const token = sampler.choose(logits, ids);
        const now = performance.now();
        first ??= now;
        last.promptSeconds = (first - began) / 1000;
        last.seconds = (now - first) / 1000;
        ids.push(token);
        last.ids.push(token);
        if (ends.has(token)) last.reason = "eos";
        else {
          const more = text.push(token);
          if (more) yield more;
          if (last.ids.length === maxTokens) last.reason = "length";
          else if (this.ids.length === capacity) last.reason = "context";
          else if (guard?.push(token)) last.reason = "loop";
          else {
            await turn();
            if (signal?.aborted) break;
            logits = await this.append([token]);
            continue;
          }
        }
        break;
      }
      const more = text.finish();
      if (more) yield more;
    } finally {
      this.busy = false;
    }
  }

  async append(ids) {
    const before = this.ids;
    this.ids = []; // if the engine fails, what its cache holds is unknown
    const logits = await this.engine.step(ids);
    this.ids = [...before, ...ids];
    return logits;
  }

  // Keep the cached tokens that the prompt begins with, all but its last token, if the engine can
  reuse(prompt) {
    let same = 0;
    while (same < this.ids.length && same < prompt.length - 1 && this.ids[same] === prompt[same]) same++;
    if (same && same === this.ids.length) return;
    if (same && this.engine.truncate(same)) this.ids.length = same;
    else {
      this.engine.reset();
      this.ids = [];
    }
  }
}
