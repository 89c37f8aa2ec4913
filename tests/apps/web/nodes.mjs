// Runs recorded nodes in the WebAssembly module: node nodes.mjs MODULE NODES RESULTS ISA THREADS. The files are those of
// tests/native/host.cpp, which says how they are written.
import { readFileSync, writeFileSync } from "node:fs";
import { Module } from "../../../apps/web/js/wasm/module.js";
import { BYTES } from "../../../apps/web/js/wasm/onnx.js";

const [wasm, recorded, results, isa, threads] = process.argv.slice(2);
const file = readFileSync(recorded);
const code = readFileSync(wasm);
const load = () => Module.load(code, { threads: Number(threads), environment: { DIFFBIT_ISA: isa } });

let at = 0;
function line() {
  const end = file.indexOf(10, at);
  const words = file.toString("utf8", at, end).split(" ");
  at = end + 1;
  return words;
}

function hex(text) {
  const [, sign, whole, fraction, exponent] = text.match(/^(-?)0x(\d)\.([0-9a-f]+)p([+-]\d+)$/);
  return (sign ? -1 : 1) * (Number(whole) + parseInt(fraction, 16) / 16 ** fraction.length) * 2 ** Number(exponent);
}

function readNode() {
  const [, name, op] = line();
  const node = { name, op, attributes: [], inputs: [], outputs: [] };
  for (;;) {
    const [what, ...rest] = line();
    if (what === "end") return node;
    if (what === "integer") node.attributes.push([rest[0], BigInt(rest[1])]);
    else if (what === "number") node.attributes.push([rest[0], { float: hex(rest[1]) }]);
    else if (what === "omitted") node.inputs.push(null);
    else if (what === "output") node.outputs.push(rest.map(Number));
    else {
      const [type, ...shape] = rest.map(Number);
      const size = shape.reduce((product, dim) => product * dim, BYTES[type]);
      node.inputs.push({ type, shape, bytes: file.subarray(at, at + size) });
      at += size + 1;
    }
  }
}

let module = await load();
const written = [];
const write = (text) => written.push(Buffer.from(text));
while (at < file.length) {
  const { name, op, attributes, inputs, outputs } = readNode();
  write(`node ${name}\n`);
  try {
    const node = module.node({ domain: "diffbit", op, attributes });
    const values = inputs.map((input) => {
      if (!input) return 0;
      const data = module.allocate(input.bytes.length);
      module.bytes(data, input.bytes.length).set(input.bytes);
      return module.value({ type: input.type, shape: input.shape, data: input.bytes.length ? data : 0 });
    });
    const results = outputs.map(([type, shared]) => {
      if (!type) return 0;
      return shared === undefined ? module.value({ memory: module.call.memory() }) : values[shared];
    });
    node.connect(values, results);
    const list = module.allocate(4);
    new Uint32Array(module.memory.buffer, list, 1)[0] = node.node;
    module.call.run(list, 1);
    for (const value of results) {
      if (!value) continue;
      const [type, shape] = [module.type(value), module.shape(value)];
      write(`output ${[type, ...shape].join(" ")}\n`);
      written.push(Buffer.from(module.bytes(module.data(value), shape.reduce((product, dim) => product * dim, BYTES[type]))));
      write("\n");
    }
  } catch (error) {
    write(`error ${error.message}\n`);
    module.close();
    module = await load();
  }
  write("end\n");
  if (module.memory.buffer.byteLength > 1 << 29) {
    module.close();
    module = await load(); // nothing is freed
  }
}
writeFileSync(results, Buffer.concat(written));
