// Reads model.onnx: the fields of ONNX's protobuf messages that diffbit's export writes. Bodies of functions are not read.

export const BYTES = { 1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 16: 2 }; // of an element, by ONNX's number of its type

// The fields of a message: [number, value], where a value is a BigInt, or the bytes of a string, message or fixed number
function* fields(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      const byte = view.getUint8(at++);
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asIntN(64, value);
    }
    throw new Error("model.onnx: a number has too many bytes");
  };
  const sizes = { 1: 8, 5: 4 };
  while (at < bytes.length) {
    const key = Number(varint());
    const kind = key & 7;
    if (kind === 0) {
      yield [key >> 3, varint()];
      continue;
    }
    const size = kind === 2 ? Number(varint()) : sizes[kind];
    if (!(size >= 0 && at + size <= bytes.length)) throw new Error("model.onnx: is damaged: a field ends beyond the file");
    yield [key >> 3, bytes.subarray(at, at + size)];
    at += size;
  }
}

const text = (bytes) => new TextDecoder().decode(bytes);
const float = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, 4).getFloat32(0, true);

// Numbers that come one by one, or packed
function integers(value) {
  if (typeof value === "bigint") return [value];
  const wrapped = new Uint8Array(value.length + 11); // as one field of a message: repeated varints without keys
  const numbers = [];
  let at = 0;
  while (at < value.length) {
    let end = at;
    while (value[end] & 128) end++;
    wrapped.set([8, ...value.subarray(at, end + 1)]);
    for (const [, number] of fields(wrapped.subarray(0, end + 2 - at))) numbers.push(number);
    at = end + 1;
  }
  return numbers;
}

function entry(bytes) {
  const pair = {};
  for (const [number, value] of fields(bytes)) pair[number] = text(value);
  return [pair[1], pair[2]];
}

// {name, type, shape, bytes} or, of weights in a file, {name, type, shape, file, offset, length}
function tensor(bytes) {
  const result = { name: "", type: 0, shape: [] };
  const external = {};
  for (const [number, value] of fields(bytes)) {
    if (number === 1) result.shape.push(...integers(value).map(Number));
    else if (number === 2) result.type = Number(value);
    else if (number === 4) result.bytes = value;
    else if (number === 7) result.bytes = new Uint8Array(BigInt64Array.from(integers(value)).buffer);
    else if (number === 8) result.name = text(value);
    else if (number === 9) result.bytes = value;
    else if (number === 13) {
      const [key, word] = entry(value);
      external[key] = word;
    }
  }
  const size = result.shape.reduce((product, dim) => product * dim, BYTES[result.type] ?? NaN);
  if (external.location !== undefined) {
    Object.assign(result, { file: external.location, offset: Number(external.offset ?? 0), length: Number(external.length ?? size) });
  } else {
    result.bytes ??= new Uint8Array(0);
    result.length = result.bytes.length;
  }
  if (result.length !== size) throw new Error(`model.onnx: ${result.name} has ${result.length} bytes, wanted ${size}`);
  return result;
}

// {name, type, shape}; a dimension is a number or a name
function valueInfo(bytes) {
  const result = { name: "", type: 0, shape: [] };
  for (const [number, value] of fields(bytes)) {
    if (number === 1) result.name = text(value);
    if (number !== 2) continue;
    for (const [kind, of] of fields(value)) {
      if (kind !== 1) continue;
      for (const [part, inside] of fields(of)) {
        if (part === 1) result.type = Number(inside);
        if (part !== 2) continue;
        for (const [, dimension] of fields(inside)) {
          let size = 0;
          for (const [what, given] of fields(dimension)) size = what === 1 ? Number(given) : text(given);
          result.shape.push(size);
        }
      }
    }
  }
  return result;
}

// A node's attribute [name, value]: a BigInt, {float}, or a list of BigInt; others are of no use to any operator here
function attribute(bytes) {
  let name = "";
  let value;
  for (const [number, field] of fields(bytes)) {
    if (number === 1) name = text(field);
    else if (number === 2) value = { float: float(field) };
    else if (number === 3) value = field;
    else if (number === 8) value = [...(value ?? []), ...integers(field)];
  }
  return [name, value];
}

function nodeOf(bytes) {
  const node = { domain: "", op: "", inputs: [], outputs: [], attributes: [] };
  for (const [number, value] of fields(bytes)) {
    if (number === 1) node.inputs.push(text(value));
    else if (number === 2) node.outputs.push(text(value));
    else if (number === 4) node.op = text(value);
    else if (number === 5) node.attributes.push(attribute(value));
    else if (number === 7) node.domain = text(value);
  }
  return node;
}

// {nodes, initializers, inputs, outputs} of a model
export function readGraph(bytes) {
  const graph = { nodes: [], initializers: [], inputs: [], outputs: [] };
  for (const [number, model] of fields(bytes)) {
    if (number !== 7) continue;
    for (const [part, value] of fields(model)) {
      if (part === 1) graph.nodes.push(nodeOf(value));
      else if (part === 5) graph.initializers.push(tensor(value));
      else if (part === 11) graph.inputs.push(valueInfo(value));
      else if (part === 12) graph.outputs.push(valueInfo(value));
    }
  }
  return graph;
}
