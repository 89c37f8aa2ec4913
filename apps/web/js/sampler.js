// Chooses the next token from its logits, as diffbit's Python does (runtime/sampler.py has the formulas and their order:
// bias, penalties, temperature, top-k, top-p, min-p, then the draw). Greedy choices are Python's; draws have the same
// probabilities, but another generator of random numbers.

const RANGES = {
  temperature: [0, 1e6], topK: [0, 2 ** 31], topP: [Number.MIN_VALUE, 1], minP: [0, 1], repetitionPenalty: [1e-6, 1e6],
  frequencyPenalty: [-100, 100], presencePenalty: [-100, 100], seed: [0, Number.MAX_SAFE_INTEGER],
};
const WHOLE = ["topK", "seed"];
const PLAIN = { temperature: 0, topK: 0, topP: 1, minP: 0, repetitionPenalty: 1, frequencyPenalty: 0, presencePenalty: 0, logitBias: {} };
const SNAKE = Object.keys(PLAIN).map((name) => [name, name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)]);

// The settings of a generation_config.json, except `changes` that are neither null nor undefined, as Python's
// Sampling.of_model reads them: "do_sample": false is greedy, and without do_sample temperature and topP default to 0.7
// and 0.9. Throws a RangeError for a value out of range, with its name.
export function samplingOf(config = {}, changes = {}) {
  const unsaid = (config.do_sample ?? null) === null;
  const settings = { ...PLAIN, temperature: unsaid ? 0.7 : 1, topK: 50, topP: unsaid ? 0.9 : 1 };
  for (const [name, snake] of SNAKE) if (name !== "logitBias") settings[name] = config[snake] ?? settings[name];
  if (!unsaid && config.do_sample !== true) settings.temperature = 0;
  for (const name of [...Object.keys(PLAIN), "seed"]) settings[name] = changes[name] ?? settings[name];
  for (const [name, [least, most]] of Object.entries(RANGES)) {
    const value = settings[name];
    if (value === undefined) continue;
    const fits = typeof value === "number" && value >= least && value <= most;
    if (!fits || (WHOLE.includes(name) && !Number.isInteger(value)))
      throw new RangeError(`${name} is ${value}, wanted a ${WHOLE.includes(name) ? "whole " : ""}number ${name === "topP" ? "above 0 and at most 1" : `from ${least} to ${most}`}`);
  }
  return settings;
}

export class Sampler {
  // settings: as samplingOf returns them; prompt: the number of tokens before the generated ones; random() -> [0, 1)
  constructor(settings, prompt = 0, random = settings.seed === undefined ? Math.random : generator(settings.seed)) {
    Object.assign(this, { settings: { ...PLAIN, ...settings }, prompt, random });
  }

  // logits [V], token ids so far -> token id
  choose(logits, ids) {
    const changed = this.changed(logits, ids);
    const best = largest(changed);
    if (!this.settings.temperature) return best;
    const { tokens, probabilities } = this.distribution(changed);
    let rest = this.random() * sum(probabilities);
    return tokens[probabilities.findIndex((probability) => (rest -= probability) < 0)] ?? tokens.at(-1);
  }

  // The logits with bias and penalties
  changed(logits, ids) {
    const { repetitionPenalty, frequencyPenalty, presencePenalty, logitBias } = this.settings;
    const biases = Object.entries(logitBias);
    if (!biases.length && repetitionPenalty === 1 && !frequencyPenalty && !presencePenalty) return logits;
    const values = Float64Array.from(logits);
    for (const [id, bias] of biases) {
      if (!(id in values)) throw new RangeError(`logitBias has token ${id}, wanted an id of the ${values.length} tokens`);
      values[id] += bias;
    }
    for (const id of new Set(ids)) values[id] = values[id] > 0 ? values[id] / repetitionPenalty : values[id] * repetitionPenalty;
    const times = new Map();
    for (const id of ids.slice(this.prompt)) times.set(id, (times.get(id) ?? 0) + 1);
    for (const [id, count] of times) values[id] -= frequencyPenalty * count + presencePenalty;
    return values;
  }

  // Candidate token ids and their probabilities (sum 1), without bias and penalties; the temperature is not 0
  distribution(logits) {
    const { temperature, topK, topP, minP } = this.settings;
    let tokens = 0 < topK && topK < logits.length ? largestOf(logits, topK) : Array.from(logits.keys());
    const most = logits[largest(logits)];
    let probabilities = tokens.map((id) => Math.exp((logits[id] - most) / temperature));
    const keep = (indices) => {
      tokens = indices.map((index) => tokens[index]);
      probabilities = indices.map((index) => probabilities[index]);
      normalize(probabilities);
    };
    normalize(probabilities);
    if (topP < 1) keep(nucleus(probabilities, topP));
    if (minP) {
      const least = minP * probabilities.reduce((a, b) => Math.max(a, b));
      keep([...probabilities.keys()].filter((index) => probabilities[index] >= least));
    }
    return { tokens, probabilities };
  }
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

function normalize(values) {
  const all = sum(values);
  for (let index = 0; index < values.length; index++) values[index] /= all;
}

// The index of the largest value, the first of equal ones
function largest(values) {
  let best = 0;
  for (let id = 1; id < values.length; id++) if (values[id] > values[best] || values[id] !== values[id]) best = id;
  if (!Number.isFinite(values[best])) throw new Error("The model returned logits that are not finite.");
  return best;
}

// Ids of the `count` largest values, ascending; among equal values the lower ids
function largestOf(values, count) {
  const limit = select(Float64Array.from(values), values.length - count);
  let equal = count;
  for (const value of values) if (value > limit) equal--;
  const ids = [];
  for (let id = 0; id < values.length; id++) if (values[id] > limit || (values[id] === limit && equal-- > 0)) ids.push(id);
  return ids;
}

// The value that index `at` would have if the values were sorted (Hoare's quickselect); reorders them
function select(values, at) {
  for (let low = 0, high = values.length - 1; low < high; ) {
    const pivot = values[(low + high) >> 1];
    let left = low;
    let right = high;
    while (left <= right) {
      while (values[left] < pivot) left++;
      while (values[right] > pivot) right--;
      if (left <= right) {
        [values[left], values[right]] = [values[right], values[left]];
        left++;
        right--;
      }
    }
    if (at <= right) high = right;
    else if (at >= left) low = left;
    else break;
  }
  return values[at];
}

// Indices of the smallest set of largest probabilities that add up to at least `topP`
function nucleus(probabilities, topP) {
  // All entries below (1 - p) / n add up to less than 1 - p, so the set lies among the others: sort only those
  const least = (1 - topP) / probabilities.length;
  const order = [...probabilities.keys()].filter((index) => probabilities[index] >= least);
  order.sort((a, b) => probabilities[b] - probabilities[a]);
  let mass = 0;
  const end = order.findIndex((index) => (mass += probabilities[index]) >= topP);
  return end < 0 ? order : order.slice(0, end + 1);
}

// Numbers in [0, 1) from a seed (Weyl's sequence through a 64-bit mix: splitmix64, doi 10.1145/2660193.2660195)
function generator(seed) {
  let state = BigInt(seed);
  const wrap = (value) => BigInt.asUintN(64, value);
  return () => {
    state = wrap(state + 0x9e3779b97f4a7c15n);
    let mixed = wrap((state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    mixed = wrap((mixed ^ (mixed >> 27n)) * 0x94d049bb133111ebn);
    return Number((mixed ^ (mixed >> 31n)) >> 11n) / 2 ** 53;
  };
}
