// The page: a conversation with the model in worker.js, or a text that it continues.
const PATIENCE = 2000;
const at = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
let chat = false;
let busy = true;
let writing; // the element that receives the answer

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

function say(kind, text) {
  const element = document.createElement("div");
  element.className = kind;
  element.textContent = text;
  at("talk").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

function wait(whether) {
  busy = whether;
  at("send").textContent = whether ? "Stop" : "Send";
  at("talk").setAttribute("aria-busy", whether);
  if (!whether) at("text").focus();
}

function send() {
  if (busy) return worker.postMessage({ halt: true });
  const text = at("text").value;
  if (!text.trim()) return;
  at("text").value = "";
  if (!chat) at("talk").replaceChildren();
  const asked = say(chat ? "user" : "prompt", text);
  writing = chat ? say("assistant", "") : asked.appendChild(document.createElement("b"));
  wait(true);
  worker.postMessage({ ask: { text, options: { maxTokens: Number(at("most").value) } } });
}

worker.addEventListener("message", ({ data }) => {
  if (data.progress) {
    const { name, length, size } = data.progress;
    at("state").textContent = `${name}: ${(length / 1e6).toFixed(1)} of ${(size / 1e6).toFixed(1)} MB`;
  }
  if (data.ready) {
    const { name, bytes, scheme, sha256, on, context_length } = data.ready;
    chat = data.ready.chat;
    document.title = at("name").textContent = name;
    const weights = scheme?.weights ?? "float";
    at("about").textContent =
      `${weights} weights, ${(bytes / 1e6).toFixed(1)} MB, context ${context_length}, ` +
      `${on}, sha256 ${sha256.slice(0, 12)}… checked`;
    at("state").textContent = chat ? "Ask something." : "Type the beginning of a text.";
    at("form").hidden = false;
    wait(false);
  }
  if (data.text) {
    writing.textContent += data.text;
    writing.scrollIntoView({ block: "end" });
  }
  if (data.answer) {
    const { ids, prompt, promptSeconds, seconds, reason } = data.answer;
    const rate = ids.length > 1 ? `${((ids.length - 1) / seconds).toFixed(1)} tokens/s` : "";
    at("state").textContent = `${prompt} tokens in ${promptSeconds.toFixed(2)} s, then ${ids.length}: ${rate} (${reason})`;
    at("talk").dataset.ids = JSON.stringify(ids);
    wait(false);
  }
  if (data.error) {
    at("state").textContent = `Error: ${data.error}`;
    wait(false);
  }
});
worker.addEventListener("error", (event) => (at("state").textContent = `Error: ${event.message || "worker.js failed"}`));

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("forget").addEventListener("click", () => {
  if (busy) return;
  worker.postMessage({ forget: true });
  at("talk").replaceChildren();
});

await isolate();
worker.postMessage({ load: true });
