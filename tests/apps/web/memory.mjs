// The module's malloc and free, and its SHA-256 beside node's: node memory.mjs MODULE -> {hashes, kept, aligned, grown} as JSON
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { Module } from "../../../apps/web/js/wasm/module.js";

const module = await Module.load(readFileSync(process.argv[2]));
let state = 1;
const random = (below) => ((state = (Math.imul(state, 1103515245) + 12345) >>> 0) >>> 8) % below;

const lengths = [...Array(200).keys(), 65535, 65536, 65537, 200_000];
const hashes = lengths.every((length) => {
  const at = module.allocate(length);
  const bytes = module.bytes(at, length).map(() => random(256));
  module.bytes(at, length).set(bytes);
  const same = module.sha256(at, length) === createHash("sha256").update(bytes).digest("hex");
  module.call.free(at);
  return same;
});

// Blocks of many sizes, each full of its number; a third of them is freed and taken again
const blocks = new Map();
let [kept, aligned, before] = [true, true, 0];
for (let turn = 0; turn < 20_000; turn++) {
  const number = random(300);
  const old = blocks.get(number);
  if (old) {
    kept &&= module.bytes(old.at, old.size).every((byte) => byte === number % 256);
    module.call.free(old.at);
    blocks.delete(number);
  } else {
    const size = random(10) ? random(2000) : random(200_000);
    const at = module.allocate(size);
    aligned &&= at % 64 === 0;
    module.bytes(at, size).fill(number % 256);
    blocks.set(number, { at, size });
  }
  if (turn === 10_000) before = module.memory.buffer.byteLength;
}
console.log(JSON.stringify({ hashes, kept, aligned, grown: module.memory.buffer.byteLength / before }));
