// The page: a conversation with the model in worker.js, or a text that it continues.
import { bytesOf, facts, formats, megabytes } from "./card.js";

const PATIENCE = 2000;
const OPTIONS = ["maxTokens", "temperature", "topK", "topP", "seed"];
const REASONS = { eos: "the end", length: "the maximum", loop: "it repeated the same words again and again", context: "the context is full", interrupted: "stopped" };
const at = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
let chat = false;
let phase = "loading"; // "paused", "ready", "answering"
let answer; // the element that receives the answer
let received; // [time, bytes] of the first progress, for the rate

// Threads need two headers. If the server does not send them, a service worker adds them after a reload. Where service
// workers are blocked or do not start within PATIENCE ms, the page goes on with one thread
async function isolate() {
  if (crossOriginIsolated) return;
  try {
    if (sessionStorage.isolated) return;
    await navigator.serviceWorker.register("sw.js");
    const late = new Promise((_, fail) => setTimeout(fail, PATIENCE));
    await Promise.race([navigator.serviceWorker.ready, late]);
    sessionStorage.isolated = "tried";
  } catch {
    return;
  }
  location.reload();
  await new Promise(() => {});
}

function tell(text, wrong = false) {
  at("state").textContent = text;
  at("state").classList.toggle("wrong", wrong);
}

function enter(next) {
  phase = next;
  document.body.dataset.phase = phase;
  at("loading").hidden = phase !== "loading" && phase !== "paused";
  at("pause").textContent = phase === "paused" ? "Go on" : "Pause";
  at("progress").hidden = phase === "paused" && !at("progress").value;
  at("form").hidden = phase !== "ready" && phase !== "answering";
  at("send").textContent = phase === "answering" ? "Stop" : chat ? "Send" : "Continue";
  at("forget").disabled = phase === "answering";
  at("talk").setAttribute("aria-busy", phase === "answering"); // it is read when it is complete
}

function load() {
  enter("loading");
  tell("Loading…");
  received = undefined;
  worker.postMessage({ load: true });
}

// The end of the conversation stays in view while the reader is there
function follow(change) {
  const talk = at("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  change();
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

function say(kind, text) {
  const element = document.createElement("div");
  element.className = kind;
  element.textContent = text;
  at("talk").append(element);
  at("talk").scrollTop = at("talk").scrollHeight;
  return element;
}

function send() {
  if (phase === "answering") return worker.postMessage({ stop: true });
  const text = at("text").value;
  if (phase !== "ready" || !text.trim()) return;
  const entries = OPTIONS.filter((name) => at(name).value !== "").map((name) => [name, Number(at(name).value)]);
  const thinking = at("thinking").hidden ? {} : { think: at("think").checked };
  at("text").value = "";
  if (!chat) at("talk").replaceChildren();
  const asked = say(chat ? "user" : "prompt", text);
  answer = chat ? say("assistant", "") : asked.appendChild(document.createElement("span"));
  at("meter").textContent = "";
  enter("answering");
  tell("Reading the text…");
  worker.postMessage({ ask: { text, options: { ...Object.fromEntries(entries), ...thinking } } });
}

function progressed({ loaded, total }) {
  if (phase !== "loading") return;
  const now = performance.now();
  received ??= [now, loaded];
  Object.assign(at("progress"), { max: total, value: loaded });
  const rate = ((loaded - received[1]) / (now - received[0])) * 1000;
  const speed = loaded < total && now - received[0] > 500 ? `, ${megabytes(rate)} a second` : "";
  tell(loaded < total ? `Loading: ${megabytes(loaded)} of ${megabytes(total)}${speed}` : "Preparing the model…");
}

// site.json: its packages and, if it is known, the model's license
const site = fetch("site.json").then((reply) => reply.json()).catch(() => ({}));

async function ready({ manifest, runtime, memory, chat: canChat, think, seconds }) {
  chat = canChat;
  document.title = at("name").textContent = manifest.name;
  at("about").textContent = `${formats(manifest)} weights, ${megabytes(bytesOf(manifest))}, on ${runtime}. Nothing that you type leaves this page.`;
  at("label").textContent = chat ? "Message" : "Beginning of a text";
  at("forget").hidden = !chat;
  at("thinking").hidden = think === undefined;
  at("think").checked = think;
  const rows = facts(manifest, await site, runtime).flatMap(([name, text]) => [["dt", name], ["dd", text]]);
  at("facts").replaceChildren(...rows.map(([kind, text]) => Object.assign(document.createElement(kind), { textContent: text })));
  at("card").hidden = false;
  enter("ready");
  tell(`Ready after ${seconds.toFixed(1)} s. ${chat ? "Ask something." : "Type the beginning of a text."}`);
  measure(memory);
  at("text").focus();
}

// The memory of the model, or of the whole page where the runtime does not know it and the browser measures pages
async function measure(memory) {
  const bytes = memory ?? (await performance.measureUserAgentSpecificMemory?.().catch(() => undefined))?.bytes;
  if (bytes && phase === "ready") at("meter").textContent = `${megabytes(bytes)} of memory`;
}

const rateOf = (tokens, seconds) => `${((tokens - 1) / (seconds || 1)).toFixed(1)} tokens/s`;

function answered({ ids, promptTokens, cachedTokens, promptSeconds, seconds, reason, dropped, memory }) {
  const rate = ids.length > 1 ? ` at ${rateOf(ids.length, seconds)}` : "";
  const kept = cachedTokens ? ` (${cachedTokens} were kept)` : "";
  const left = dropped ? ` ${dropped} older messages were left out.` : "";
  at("talk").dataset.ids = JSON.stringify(ids);
  enter("ready");
  tell(`Read ${promptTokens} tokens in ${promptSeconds.toFixed(2)} s${kept}, wrote ${ids.length}${rate}: ${REASONS[reason]}.${left}`);
  at("meter").textContent = "";
  measure(memory);
  at("text").focus();
}

function failed(message) {
  enter(phase === "answering" ? "ready" : "paused");
  tell(`Error: ${message}`, true);
}

worker.addEventListener("message", ({ data }) => {
  if (data.progress) progressed(data.progress);
  if (data.ready) ready(data.ready);
  if (data.text) {
    follow(() => (answer.textContent += data.text));
    at("meter").textContent = `${data.tokens} tokens, ${rateOf(data.tokens, data.seconds)}`;
  }
  if (data.answer) answered(data.answer);
  if (data.stopped) {
    enter("paused");
    tell("The download is paused. What has come is kept, if this browser keeps files.");
  }
  if (data.error) failed(data.error);
});
worker.addEventListener("error", (event) => failed(event.message || "worker.js cannot be loaded. Reload the page."));

at("pause").addEventListener("click", () => (phase === "paused" ? load() : worker.postMessage({ stop: true })));
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (phase === "ready") at("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && phase === "answering") send();
});
at("forget").addEventListener("click", () => {
  worker.postMessage({ forget: true });
  at("talk").replaceChildren();
  tell("Ask something.");
  at("text").focus();
});

await isolate();
load();
