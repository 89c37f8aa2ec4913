// Draws what document.py describes. Everything from the data is shown as text, never as HTML.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const BLUE = "46,125,220", AMBER = "214,120,20";  // on white and on black
const BITS = [0, 8, 4, 2];  // the stops of a slider
const WHAT = { weights: "Weights", kv: "KV cache", logits: "Attention logits" };
const layers = [...new Set(data.models.flatMap((model) => model.layers.map((one) => one.layer)))].sort((a, b) => a - b);
const longest = Math.max(...data.models.map((model) => model.tokens.length));
const state = { layer: layers[0], head: 0, query: longest - 1, what: "nothing", bits: 0 };

function make(tag, attributes = {}, ...children) {
  const element = tag === "svg" || tag === "rect" || tag === "line" || tag === "title"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const short = (number) => (Math.abs(number) >= 1000 ? number.toFixed(0) : Number(number.toPrecision(3)).toString());
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "→").replace(/ /g, "␣").replace(/[\u0000-\u001f\u007f-\u009f]/g, "·");
const quoted = (text) => `‘${visible(text).replace(/^␣(?=.)/, "")}’`;

// The base64 of a setting, decoded once
const decoded = new Map();
function bytes(text) {
  if (!decoded.has(text)) decoded.set(text, Uint8Array.from(atob(text), (character) => character.charCodeAt(0)));
  return decoded.get(text);
}

// What a model shows now: its nearest layer and head, the setting, and its weights as functions of query and key
function view(model) {
  const place = model.layers.reduce((best, one, index) =>
    Math.abs(one.layer - state.layer) < Math.abs(model.layers[best].layer - state.layer) ? index : best, 0);
  const { layer, heads, branches } = model.layers[place];
  const head = Math.min(state.head, heads - 1), length = model.tokens.length;
  const query = Math.max(0, state.query - (longest - length));
  const setting = model.settings.find(({ what, bits }) => what === state.what && bits === state.bits) ?? model.settings[0];
  const codes = bytes(setting.maps), size = (length * (length + 1)) / 2;
  const lambdaBytes = bytes(setting.lambdas);
  const lambdas = new Float32Array(lambdaBytes.buffer, 0, lambdaBytes.length / 4);
  let start = 0, first = 0;
  for (const one of model.layers.slice(0, place)) {
    start += one.heads * one.branches * size;
    first += one.branches === 2 ? one.heads * length : 0;
  }
  start += head * branches * size;
  const branch = (index) => (query, key) => (codes[start + index * size + (query * (query + 1)) / 2 + key] / 255) ** 2;
  const lambda = (query) => lambdas[first + head * length + query];
  const maps = branches === 1 ? [branch(0)] : [branch(0), branch(1)];
  const used = branches === 1 ? maps[0] : (query, key) => maps[0](query, key) - lambda(query) * maps[1](query, key);
  return { model, layer, head, heads, branches, length, query, setting, maps, lambda, used };
}

const alpha = (weight) => Math.min(1, Math.sqrt(Math.abs(weight)));
const color = (weight, hue, most = 1) => `rgba(${weight < 0 ? AMBER : hue},${(most * alpha(weight)).toFixed(3)})`;

function draw(canvas, { length, query }, weight, hue) {
  const cell = Math.max(4, Math.floor(640 / length)), pen = canvas.getContext("2d");
  canvas.width = canvas.height = cell * length;
  for (let row = 0; row < length; row++)
    for (let column = 0; column <= row; column++) {
      pen.fillStyle = color(weight(row, column), hue);
      pen.fillRect(column * cell, row * cell, cell, cell);
    }
  pen.strokeStyle = "rgb(128,128,128)";
  pen.lineWidth = Math.max(2, cell / 6);
  pen.strokeRect(1, query * cell, (query + 1) * cell - 1, cell);
}

function shares({ model, query }, weight) {
  const total = Array.from({ length: query + 1 }, (_, key) => Math.abs(weight(query, key)));
  const sum = total.reduce((a, b) => a + b, 0) || 1;
  const answer = model.answer.filter((key) => key <= query).reduce((a, key) => a + total[key], 0) / sum;
  const below = total.reduce((a, part, key) => a + (weight(query, key) < 0 ? part : 0), 0) / sum;
  return { first: total[0] / sum, answer, below };
}

function shareBars(now, weight, hue, difference) {
  const { first, answer, below } = shares(now, weight);
  const rows = [["first token", first, hue]];
  if (data.answer !== null) rows.push([quoted(data.answer), answer, hue]);
  if (difference) rows.push(["below zero", below, AMBER]);
  const box = make("div", { class: "shares" });
  for (const [name, share, which] of rows)
    box.append(make("span", {}, name), bar(share, which === AMBER), make("span", {}, percent(share)));
  if (!difference && now.branches === 2) box.append(make("span", { class: "blank" }, "\u00a0"));  // as high as the difference's
  return box;
}

function bar(share, amber, before) {
  const fill = make("i", amber ? { class: "n" } : {}), box = make("span", { class: "bar" }, fill);
  fill.style.width = `${100 * Math.min(1, share)}%`;
  if (before !== undefined) {
    const tick = make("b");
    tick.style.left = `calc(${100 * Math.min(1, before)}% - 1px)`;
    box.append(tick);
  }
  return box;
}

// The prompt, each token with the color of its weight for the query
function text({ model, query }, weight, hue) {
  const box = make("div", { class: "text" });
  model.tokens.forEach((token, index) => {
    const classes = [index > query && "later", index === query && "now", model.answer.includes(index) && "answer"];
    const span = make("span", { class: classes.filter(Boolean).join(" "), "data-token": index });
    span.append(token.trim() ? token.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f]/g, "·") : token.replace(/\n/g, "⏎\n").replace(/ /g, "·"));
    if (index <= query) {
      span.style.backgroundColor = color(weight(query, index), hue, 0.75);
      span.title = `${visible(token)}: ${weight(query, index).toFixed(4)}`;
    }
    box.append(span);
  });
  return box;
}

function figure(now, name, note, weight, hue, difference = false) {
  const canvas = make("canvas", { role: "img" });
  draw(canvas, now, weight, hue);
  const best = mostRead(now, weight);
  canvas.setAttribute("aria-label", `${name} map; token ${quoted(now.model.tokens[now.query])} reads ${quoted(now.model.tokens[best])} most, ${percent(weight(now.query, best))}`);
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const [key, query] = [event.clientX - box.left, event.clientY - box.top].map((x) =>
      Math.max(0, Math.min(now.length - 1, Math.floor((x / box.width) * now.length))));
    return { key, query };
  };
  canvas.addEventListener("pointermove", (event) => {
    const { key, query } = place(event);
    if (key <= query) readout(now, query, key);
  });
  canvas.addEventListener("pointerleave", () => readout(now, now.query, mostRead(now, now.used)));
  canvas.addEventListener("click", (event) => choose({ query: place(event).query + longest - now.length }));
  const caption = make("figcaption", {}, name, make("small", {}, note));
  return make("figure", {}, caption, canvas, shareBars(now, weight, hue, difference), text(now, weight, hue));
}

function mostRead({ query }, weight) {
  let best = 0;
  for (let key = 0; key <= query; key++) if (weight(query, key) > weight(query, best)) best = key;
  return best;
}

function readout(now, query, key) {
  const names = now.branches === 2 ? ["signal", "noise"] : ["weight"];
  const parts = now.maps.map((map, index) => `${names[index]} ${map(query, key).toFixed(3)}`);
  if (now.branches === 2) parts.push(`difference ${now.used(query, key).toFixed(3)}`);
  at(`readout-${data.models.indexOf(now.model)}`).textContent =
    `${quoted(now.model.tokens[query])} reads ${quoted(now.model.tokens[key])}: ${parts.join(", ")}`;
}

function equation(now) {
  const parts = [nextTokens(now), ...(now.model.stored === null ? [cost(now)] : []), outliers(now)];
  const line = make("p", { class: "readout", id: `readout-${data.models.indexOf(now.model)}` });
  if (now.branches === 1) {  // its only map stands where the others have their difference
    const map = figure(now, "The only map", "what the head reads", now.used, BLUE);
    map.append(line);
    const note = make("p", { class: "note" }, "A plain head has one map. Nothing is subtracted: what noise it has multiplies the values, too.");
    return [make("div", { class: "equation" }, make("div", { class: "sections" }, note, ...parts), map)];
  }
  const fixed = [...Array(now.length).keys()].every((query) => now.lambda(query) === now.lambda(0));
  return [make("div", { class: "equation" },
    figure(now, "Signal", "softmax(Q₁K₁ᵀ)", now.maps[0], BLUE),
    make("div", { class: "operator" }, `− ${now.lambda(now.query).toFixed(3)} ×`, make("small", {}, fixed ? "λ, learned" : "λ of this token")),
    figure(now, "Noise", "softmax(Q₂K₂ᵀ)", now.maps[1], AMBER),
    make("div", { class: "operator" }, "="),
    figure(now, "Difference", "what the head reads", now.used, BLUE, true)),
  line, make("div", { class: "below" }, ...parts)];
}

function nextTokens({ model, setting }) {
  const box = make("div", { class: "next" });
  const most = Math.max(...setting.next.flatMap((one) => [one.probability, one.before]));
  for (const { token, probability, before } of setting.next)
    box.append(make("code", { title: visible(token) }, visible(token)),
      bar(probability / most, false, setting.what === "nothing" ? undefined : before / most),
      make("span", { class: "value" }, percent(probability)));
  const still = model.stored === null ? "Move a slider to round something." : "Quantized already; sliders do not change it.";
  const note = setting.what === "nothing" ? still : "The mark is the probability in float.";
  return make("section", {}, make("h3", {}, "The next token"), box, make("p", {}, note));
}

function cost({ model }) {
  const table = make("table"), body = make("tbody");
  table.append(make("thead", {}, make("tr", {}, make("th"), ...BITS.slice(1).map((bits) => make("th", { scope: "col" }, `${bits} bits`)))), body);
  for (const what of Object.keys(WHAT)) {
    const row = make("tr", {}, make("th", { scope: "row" }, WHAT[what]));
    for (const bits of BITS.slice(1)) {
      const setting = model.settings.find((one) => one.what === what && one.bits === bits);
      if (!setting) { row.append(make("td", {}, "–")); continue; }
      const pressed = state.what === what && state.bits === bits;
      const button = make("button", { type: "button", "aria-pressed": pressed, "data-setting": `${what} ${bits}` }, setting.kl < 0.00005 ? "0.0000" : setting.kl.toFixed(4));
      button.style.backgroundColor = color(Math.min(1, setting.kl * 4), AMBER, 0.6);
      row.append(make("td", {}, button));
    }
    body.append(row);
  }
  return make("section", {}, make("h3", {}, "What rounding costs"), table,
    make("p", {}, "KL divergence of the next token’s probabilities, in nats; 0: nothing is lost. Click one to see it."));
}

function outliers(now) {
  const { model } = now, all = data.models.flatMap((one) => one.outliers);
  const box = make("section", {}, make("h3", {}, "The largest numbers, by layer"));
  const entry = model.outliers.find(({ layer }) => layer === now.layer);
  const { hidden, logits } = entry;
  const token = (index) => quoted(model.tokens[index]);
  const words = {
    hidden: `Hidden states, layer ${now.layer}: at most ${short(hidden.largest)}, ${short(hidden.largest / hidden.median)} times the median, at ${token(hidden.token)}, channel ${hidden.channel}; kurtosis ${hidden.kurtosis === null ? "–" : short(hidden.kurtosis)}.`,
    logits: `Attention logits, layer ${now.layer}: at most ${short(logits.largest)}, head ${logits.head}${now.branches === 2 ? ` (${["signal", "noise"][logits.branch]})` : ""}, ${token(logits.query)} reading ${token(logits.key)}.`,
  };
  for (const site of ["hidden", "logits"]) {
    const most = Math.max(...all.map((one) => one[site]?.largest ?? 0)), width = Math.min(40, 320 / model.outliers.length);
    const chart = make("svg", { viewBox: "0 0 320 44", role: "img", "aria-label": words[site] }, make("line", { x1: 0, x2: 320, y1: 43.5, y2: 43.5 }));
    model.outliers.forEach((one, index) => {
      const height = one[site] ? Math.max(1, (42 * one[site].largest) / most) : 0, gap = Math.min(3, width / 5);
      chart.append(make("rect", { x: index * width + gap / 2, y: 43 - height, width: width - gap, height, class: one.layer === now.layer ? "now" : "" }));
      const hit = make("rect", { x: index * width, y: 0, width, height: 44, class: "hit" }, make("title", {}, `layer ${one.layer}: ${one[site] ? short(one[site].largest) : "–"}`));
      hit.addEventListener("click", () => choose({ layer: one.layer }));
      chart.append(hit);
    });
    box.append(chart, make("p", {}, words[site]));
  }
  return box;
}

function article(model, index) {
  const now = view(model);
  const kind = { softmax: "a plain Transformer", diff_v1: "differential attention, version 1", diff_v2: "differential attention, version 2" };
  const where = `layer ${now.layer} of 0–${model.num_layers - 1}, head ${now.head} of 0–${now.heads - 1}`;
  const box = make("article", { id: `model-${index}` },
    make("div", { class: "head" }, make("h2", {}, model.name), make("span", {}, (kind[model.attention] ?? model.attention) + (model.stored === null ? "" : `, ${model.stored} weights`)), make("span", {}, where)),
    ...equation(now));
  return { box, now };
}

function status() {
  if (state.what === "nothing") return "Nothing is rounded.";
  const parts = data.models.map((model) => {
    const { setting } = view(model);
    if (setting.what !== state.what)
      return `${model.name}: as before${model.stored === null ? "" : ", because it is quantized already"}`;
    const [before, after] = [model.settings[0].next[0].token, setting.next[0].token];
    const change = before === after ? `${quoted(after)} stays the most likely next token` : `the most likely next token turns from ${quoted(before)} to ${quoted(after)}`;
    return `${model.name}: ${change}, KL ${setting.kl.toFixed(4)}`;
  });
  return `${WHAT[state.what]} at ${state.bits} bits. ${parts.join("; ")}.`;
}

function render() {
  const shown = data.models.map(article);
  const focused = document.activeElement?.dataset?.setting, inside = document.activeElement?.closest?.("article")?.id;
  at("models").replaceChildren(...shown.map(({ box }) => box));
  if (focused) at(inside).querySelector(`[data-setting="${focused}"]`)?.focus();
  for (const { now } of shown) readout(now, now.query, mostRead(now, now.used));
  const { tokens } = data.models.find((model) => model.tokens.length === longest);
  at("layer").value = layers.indexOf(state.layer);
  at("head").value = state.head;
  at("query").value = state.query;
  at("layer-value").textContent = state.layer;
  at("head-value").textContent = state.head;
  at("query-value").textContent = `${quoted(tokens[state.query])}${state.query === longest - 1 ? ", the last" : ""}`;
  for (const what of Object.keys(WHAT)) {
    const bits = state.what === what ? state.bits : 0, words = bits ? `${bits} bits` : "float";
    at(what).value = BITS.indexOf(bits);
    at(what).setAttribute("aria-valuetext", words);
    at(`${what}-value`).textContent = words;
    at(`${what}-value`).className = bits ? "on" : "";
  }
  at("status").textContent = status();
}

function choose(change) {
  const mostHeads = Math.max(...data.models.flatMap((model) => model.layers.map((one) => one.heads)));
  Object.assign(state, change);
  if (!layers.includes(state.layer))
    state.layer = layers.reduce((best, layer) => (Math.abs(layer - state.layer) < Math.abs(best - state.layer) ? layer : best));
  state.head = Math.max(0, Math.min(mostHeads - 1, state.head));
  state.query = Math.max(0, Math.min(longest - 1, state.query));
  at("layer").max = layers.length - 1;
  at("head").max = mostHeads - 1;
  at("query").max = longest - 1;
  render();
}

at("layer").addEventListener("input", (event) => choose({ layer: layers[event.target.value] }));
at("head").addEventListener("input", (event) => choose({ head: Number(event.target.value) }));
at("query").addEventListener("input", (event) => choose({ query: Number(event.target.value) }));
for (const what of Object.keys(WHAT))
  at(what).addEventListener("input", (event) => {
    const bits = BITS[event.target.value];
    choose({ what: bits ? what : "nothing", bits });
  });
at("controls").addEventListener("submit", (event) => event.preventDefault());
at("models").addEventListener("click", ({ target }) => {
  if (target.dataset.setting) {
    const [what, bits] = target.dataset.setting.split(" ");
    choose(state.what === what && state.bits === Number(bits) ? { what: "nothing", bits: 0 } : { what, bits: Number(bits) });
  }
  if (target.dataset.token) {
    const model = data.models[Number(target.closest("article").id.slice("model-".length))];
    choose({ query: Number(target.dataset.token) + longest - model.tokens.length });
  }
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input") || event.altKey || event.ctrlKey || event.metaKey) return;
  const layer = layers.indexOf(state.layer);
  const move = {
    ArrowLeft: { head: state.head - 1 }, ArrowRight: { head: state.head + 1 },
    ArrowUp: { layer: layers[Math.max(0, layer - 1)] }, ArrowDown: { layer: layers[Math.min(layers.length - 1, layer + 1)] },
  }[event.key];
  if (!move) return;
  event.preventDefault();
  choose(move);
});
const blocks = Math.floor(longest / 32) * 32;
at("notes").textContent =
  "Color: the square root of the weight; blue is positive, amber is noise, and in a difference below zero. Shares of a difference are of its magnitudes. " +
  "Weights are rounded to nearest (int8; 4 and 2 bits in groups of 32; embedding and head to int8). The cache keeps no first or recent tokens in float16. At 4 and 2 bits it rounds whole blocks of 32 tokens: " +
  `${blocks ? `the first ${blocks} of ${longest}` : `none of these ${longest}`}. Logits have one scale per query. The largest numbers are those without rounding.`;
if (data.answer !== null) {  // opens at the head that reads the answer most
  const [{ layers: places, settings: [{ heads }] }] = data.models;
  const all = heads.flatMap((row, place) => row.map((one, head) => ({ layer: places[place].layer, head, share: one.answer?.at(-1) ?? 0 })));
  const { layer, head } = all.reduce((best, one) => (one.share > best.share ? one : best));
  Object.assign(state, { layer, head });
}
choose({});
