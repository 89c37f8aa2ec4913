// What web.py measures, in the page: each loads a model and continues a text greedily.
// ({place, text, tokens, threads}) -> {load, first, tokens, rest}: seconds until it is loaded, until the first token, and from
// the first of the tokens to the last

const now = () => performance.now() / 1000;

export async function diffbit({ place, text, tokens, threads }) {
  const { load } = await import("diffbit");
  const began = now();
  const model = await load(place, { device: "cpu", threads });
  const loaded = now();
  for await (const more of model.generate(text, { maxTokens: tokens, temperature: 0 })) continue;
  const { ids, promptSeconds, seconds } = model.last;
  return { load: loaded - began, first: promptSeconds, tokens: ids.length, rest: seconds };
}

export async function wllama({ place, text, tokens, threads }) {
  const { Wllama } = await import("/lib/@wllama/wllama/esm/index.js");
  const model = new Wllama({ default: "/lib/@wllama/wllama/esm/wasm/wllama.wasm" }, { suppressNativeLog: true });
  const began = now();
  const address = new URL(place, location.href).href;
  await model.loadModelFromUrl(address, { n_threads: threads, n_gpu_layers: 0, n_ctx: 1024, useCache: false });
  const loaded = now();
  const times = [];
  const stream = await model.createCompletion({ prompt: text, max_tokens: tokens, temperature: 0, stream: true });
  for await (const chunk of stream) if (chunk.choices?.[0]?.text) times.push(now());
  return timed(began, loaded, times);
}

export async function transformers({ place, text, tokens, threads }) {
  const { AutoModelForCausalLM, AutoTokenizer, BaseStreamer, env } = await import("@huggingface/transformers");
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/", useBrowserCache: false });
  Object.assign(env.backends.onnx.wasm, { wasmPaths: "/lib/onnxruntime-web/dist/", numThreads: threads });
  const began = now();
  const tokenizer = await AutoTokenizer.from_pretrained(place);
  const model = await AutoModelForCausalLM.from_pretrained(place);
  const loaded = now();
  const times = [];
  class Clock extends BaseStreamer {
    put() {
      times.push(now());
    }

    end() {}
  }
  await model.generate({ ...(await tokenizer(text)), max_new_tokens: tokens, do_sample: false, streamer: new Clock() });
  return timed(began, loaded, times.slice(1)); // the first is the prompt's
}

function timed(began, loaded, times) {
  return { load: loaded - began, first: times[0] - loaded, tokens: times.length, rest: times.at(-1) - times[0] };
}
