"""Ways to damage a file: its bytes, and the structure of the formats that diffbit reads.

Each takes the bytes of a file and a random generator, and returns other bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import onnx
from onnx import helper
from sentencepiece import sentencepiece_model_pb2

Mutation = Callable[[bytes, Random], bytes]

COUNTS = (0, 1, 2, 3, 7, 127, 128, 255, 256, 65535, 1 << 24, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 62)
INTEGERS = (*COUNTS, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, -1, -2, -(1 << 31), -(1 << 63), -(10**30))
TEXTS = (
    "", " ", "\0", "..", "../secret", "/etc/passwd", "a/b", "C:\\x", "x" * 5000, "é日本語🙂",
    "\u202e\u0301", "\ud800", "\n\r\t",
    "none", "int4_g32", "int8", "int0_g0", "int999999", "int4_g-1", "nan", "*", "[", "float64", "{{", "%s", "(a*)*b",
)  # fmt: skip
DEPTHS = (3, 60, 2000, 100_000)


class Raw(str):
    """JSON as it is to be written."""


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may be there twice."""


def damage_bytes(data: bytes, random: Random) -> bytes:
    """A few bits, bytes or spans."""
    result = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5, 30))):
        at = random.randrange(len(result) + 1)
        if random.random() < 0.5:
            at = min(at, random.randrange(200))  # headers are where sizes are
        span = random.choice((1, 2, 4, 8, 64, 1000))
        kind = random.randrange(8)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            result[at : at + span] = random.randbytes(span)
        elif kind == 2:
            del result[at : at + span]
        elif kind == 3:
            result[at:at] = result[at : at + span]
        elif kind == 4:
            del result[at:]
        elif kind == 5:
            result[at:at] = random.choice(TEXTS).encode("utf-8", "surrogatepass")
        elif kind == 6:
            result[at : at + span] = bytes(span)
        else:
            size = random.choice((1, 2, 4, 8))
            result[at : at + size] = (random.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(result)


def hostile(random: Random, value: Any = None) -> Any:
    """A value that a reader of JSON may not expect in the place of `value`."""
    kind = random.randrange(9)
    if kind == 0 and isinstance(value, int | float) and math.isfinite(value):
        return random.choice((value + 1, value - 1, -value, 2 * value, value / 3, float(value), str(value)))
    if kind <= 2:
        return random.choice(INTEGERS)
    if kind == 3:
        return Raw(random.choice(("NaN", "Infinity", "-Infinity", "1e999", "-0.0", "1e-320", "0.5", "9" * 5000)))
    if kind == 4:
        return random.choice(TEXTS)
    if kind == 5:
        depth = random.choice(DEPTHS)
        return Raw(random.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))
    many = [value] * (2 if isinstance(value, dict | list) else 1000)
    return random.choice((None, True, False, [], {}, [value], {"a": value}, many, [random.choice(INTEGERS)]))


def damage_tree(value: Any, random: Random) -> Any:
    """One change somewhere in JSON."""
    if isinstance(value, dict) and value and not isinstance(value, Pairs) and random.random() < 0.9:
        key = random.choice(list(value))
        kind = random.randrange(12)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return Pairs([*value.items(), (key, damage_tree(value[key], random))])
        if kind == 2:
            return {(random.choice(TEXTS) if k == key else k): v for k, v in value.items()}
        if kind == 3:
            return value | {key: value[random.choice(list(value))]}
        if kind == 4:
            return value | {random.choice(TEXTS): hostile(random)}
        return value | {key: damage_tree(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        kind = random.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value[: at + 1] * 2 + value[at + 1 :]
        if kind == 2:
            return value[::-1]
        return [*value[:at], damage_tree(value[at], random), *value[at + 1 :]]
    return hostile(random, value)


def dumps(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict | Pairs):
        items = value if isinstance(value, Pairs) else value.items()
        return "{" + ",".join(f"{json.dumps(key)}:{dumps(inner)}" for key, inner in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def damage_json(data: bytes, random: Random) -> bytes:
    if random.random() < 0.15:
        return damage_bytes(data, random)
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 2))):
        if not isinstance(value, Pairs):
            value = damage_tree(value, random)
    return dumps(value).encode("utf-8", "surrogatepass")


def damage_jsonl(data: bytes, random: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at = random.randrange(len(lines))
    return b"".join([*lines[:at], damage_json(lines[at], random), *lines[at:]])


def damage_safetensors(data: bytes, random: Random) -> bytes:
    """Its header, its data (numbers that are no numbers), or its bytes."""
    start = 8 + int.from_bytes(data[:8], "little")
    kind = random.randrange(4)
    if kind == 0:
        return damage_bytes(data, random)
    if kind == 1:
        at = random.randrange(start, max(start + 1, len(data) - 8))
        odd = random.choice((math.nan, math.inf, -math.inf, 3e38, 1e-40, -0.0))
        packed = struct.pack(random.choice(("<f", "<e")), odd if abs(odd) < 6e4 or odd != odd else math.inf)
        return data[:at] + packed * random.choice((1, 1, 100)) + data[at + 4 :]
    header = damage_json(data[8:start], random)
    length = len(header) if kind == 2 or random.random() < 0.7 else random.choice(INTEGERS) % (1 << 64)
    return length.to_bytes(8, "little") + header + data[start:]


GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its type
GGUF_STRING, GGUF_ARRAY = 8, 9


@dataclass
class Header:
    """Of a GGUF file that is right, as offsets and bytes: its numbers (counts, lengths, types, dimensions, values), the
    metadata (each from its type to its end), and where tensors begin; `end` is that of the header."""

    numbers: list[tuple[int, int]]
    values: list[tuple[int, int]]
    offsets: list[tuple[int, int]]
    end: int = 0


def gguf_header(data: bytes) -> Header:
    places: list[tuple[int, int]] = [(4, 4)]
    header = Header(places, [], [])
    at = 8

    def number(size: int) -> int:
        nonlocal at
        places.append((at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def text() -> None:
        nonlocal at
        length = number(8)
        at += length

    def value(kind: int) -> None:
        nonlocal at
        if kind == GGUF_STRING:
            text()
        elif kind == GGUF_ARRAY:
            of, count = number(4), number(8)
            for _ in range(count):
                value(of)
        else:
            number(GGUF_SIZES[kind])

    tensors, pairs = number(8), number(8)
    for _ in range(pairs):
        text()
        begin = at
        value(number(4))
        header.values.append((begin, at - begin))
    for _ in range(tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
        header.offsets.append(places[-1])
    header.end = at
    return header


def gguf_value(random: Random, kind: int) -> bytes:
    """A value of a type, any."""
    if kind == GGUF_STRING:
        text = random.choice(TEXTS).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(text)) + text
    if kind == GGUF_ARRAY:
        of, count = random.choice((*GGUF_SIZES, GGUF_STRING)), random.choice((0, 1, 2, 300))
        return struct.pack("<IQ", of, count) + b"".join(gguf_value(random, of) for _ in range(count))
    return (random.choice(INTEGERS) % (1 << 64)).to_bytes(8, "little")[: GGUF_SIZES[kind]]


def damage_gguf(data: bytes, random: Random) -> bytes:
    """Its bytes; metadata of another type, the tensors in their right places; where a tensor begins; or any number."""
    kind, header, result = random.random(), gguf_header(data), bytearray(data)
    if kind < 0.2:
        return damage_bytes(data, random)
    if kind < 0.5:
        at, size = random.choice(header.values)
        of = random.choice((*GGUF_SIZES, GGUF_STRING, GGUF_ARRAY))
        result[at : at + size] = struct.pack("<I", of) + gguf_value(random, of)
        end = header.end + len(result) - len(data)
        result[end : -(-header.end // 32) * 32 + len(result) - len(data)] = bytes(-end % 32)
        return bytes(result)
    if kind < 0.6:
        (at, _), (other, _) = random.choice(header.offsets), random.choice(header.offsets)
        (before,) = struct.unpack_from("<Q", data, other)
        struct.pack_into("<Q", result, at, max(0, before + random.choice((0, 0, 1, 4, 32, -32))))
        return bytes(result)
    places = header.numbers
    for _ in range(random.choice((1, 1, 2, 4))):
        at, size = random.choice(places[:60] if random.random() < 0.4 else places)
        before = int.from_bytes(data[at : at + size], "little")
        changed = random.choice((*INTEGERS, before + 1, before - 1, before * 2, before + 32))
        result[at : at + size] = (changed % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(result)


def damage_text(data: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        return damage_bytes(data, random)
    at = random.randrange(len(data) + 1)
    depth = random.choice(DEPTHS)
    odd = (
        b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\0" * 100, b"\r", b"a" * 100_000, b"\n" * 10_000, b"=", b"[[",
        b'"""',
        b"[" * depth, b"{" * depth, b"9" * 5000, b"1e999", b"[a]\n[a]\n", b"nan", b"\xf0\x9f\x99\x82" * 99,
        b"(" * depth,
        b"{% for i in range(10**9) %}{% endfor %}", b"{{ 'x' * 10**10 }}", b"{{ messages.__class__ }}",
        b"{% include 'x' %}",
        b"{{ ''.join(messages) }}", b"{{ 10 ** 10 ** 10 }}", b"{{ messages[99].content }}", b"{% raw %}",
    )  # fmt: skip
    return data[:at] + random.choice(odd) + data[at + random.choice((0, 0, 5)) :]


def damage_sentencepiece(data: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return damage_bytes(data, random)
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)  # type: ignore[attr-defined]  # made at import
    for _ in range(random.choice((1, 1, 3))):
        piece = random.choice(proto.pieces)
        kind = random.randrange(9)
        if kind == 0:
            piece.score = random.choice((math.nan, math.inf, -math.inf, 3e38, 0.0))
        elif kind == 1:
            piece.piece = random.choice([text for text in TEXTS if text.isprintable()])
        elif kind == 2:
            piece.type = random.choice((1, 2, 3, 4, 5, 6))
        elif kind == 3:
            proto.pieces.add().CopyFrom(piece)
        elif kind == 4:
            del proto.pieces[random.randrange(len(proto.pieces)) :]
        elif kind == 5:
            name = random.choice(("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size"))
            setattr(proto.trainer_spec, name, random.choice((-1, -(1 << 31), 0, 3, 1000, (1 << 31) - 1)))
        elif kind == 6:
            proto.trainer_spec.model_type = random.choice((1, 2, 3, 4))
        elif kind == 7:
            proto.normalizer_spec.precompiled_charsmap = random.randbytes(random.choice((0, 1, 4, 100)))
        else:
            name = random.choice(("byte_fallback", "treat_whitespace_as_suffix"))
            setattr(proto.trainer_spec, name, not getattr(proto.trainer_spec, name))
        if not proto.pieces:
            break
    return bytes(proto.SerializeToString())


def damage_graph(data: bytes, random: Random) -> bytes:
    """An ONNX model: its nodes, attributes, shapes, types, initializers and where their bytes lie; or its bytes."""
    if random.random() < 0.3:
        return damage_bytes(data, random)
    model = onnx.load_model_from_string(data)
    for _ in range(random.choice((1, 1, 2))):
        random.choice((_node, _attribute, _value, _tensor, _external, _model))(model, random)
    return bytes(model.SerializeToString())


def _nodes(model: onnx.ModelProto, random: Random) -> Any:
    return random.choice([model.graph.node, *(function.node for function in model.functions)])


def _node(model: onnx.ModelProto, random: Random) -> None:
    nodes = _nodes(model, random)
    node, other = random.choice(nodes), random.choice(nodes)
    kind = random.randrange(8)
    if kind == 0:
        nodes.remove(node)
    elif kind == 1:
        nodes.add().CopyFrom(node)
    elif kind == 2:
        node.op_type = random.choice((other.op_type, "Loop", "If", "Missing", "Gather", "Reshape"))
    elif kind == 3:
        node.domain = random.choice(("", "diffbit", "com.microsoft", "ai.onnx.ml", "x"))
    elif kind == 4 and node.input:
        node.input[random.randrange(len(node.input))] = random.choice([*other.input, *other.output, "", "nothing"])
    elif kind == 5 and node.output:
        node.output[random.randrange(len(node.output))] = random.choice([*other.output, "", "nothing"])
    elif kind == 6:
        node.input.extend(other.input)
    elif node.input:
        del node.input[-1]


def _attribute(model: onnx.ModelProto, random: Random) -> None:
    with_some = [node for node in _nodes(model, random) if node.attribute]
    if not with_some:
        return
    attribute = random.choice(random.choice(with_some).attribute)
    kind = random.randrange(4)
    small = [number for number in INTEGERS if -(1 << 63) <= number < 1 << 63]
    if kind == 0:
        attribute.i = random.choice(small)
    elif kind == 1:
        attribute.f = random.choice((math.nan, math.inf, -1.0, 0.0, 3e38))
    elif kind == 2:
        attribute.type = random.choice((1, 2, 3, 4, 5, 6, 7, 8))
    else:
        attribute.ints.append(random.choice(small))


def _value(model: onnx.ModelProto, random: Random) -> None:
    """An input or output of the graph."""
    values = random.choice((model.graph.input, model.graph.output))
    value = random.choice(values)
    kind = random.randrange(5)
    tensor = value.type.tensor_type
    if kind == 0:
        tensor.elem_type = random.randrange(24)
    elif kind == 1 and tensor.shape.dim:
        dim = random.choice(tensor.shape.dim)
        dim.dim_value = random.choice((0, 1, 2, -1, 1 << 31, 1 << 62))
    elif kind == 2:
        value.name = random.choice((random.choice(values).name, "x"))
    elif kind == 3:
        values.remove(value)
    else:
        tensor.shape.dim.add().dim_param = "batch"


def _tensor(model: onnx.ModelProto, random: Random) -> None:
    tensor = random.choice(model.graph.initializer)
    kind = random.randrange(5)
    if kind == 0 and tensor.dims:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice((0, 1, 3, -1, 1 << 20, 1 << 31, 1 << 62))
    elif kind == 1:
        tensor.data_type = random.randrange(24)
    elif kind == 2:
        tensor.name = random.choice(model.graph.initializer).name
    elif kind == 3 and tensor.raw_data:
        tensor.raw_data = damage_bytes(tensor.raw_data, random)
    else:
        tensor.dims.append(random.choice((0, 1, 2, 1 << 40)))


def _external(model: onnx.ModelProto, random: Random) -> None:
    """Where the bytes of a tensor lie."""
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    tensor = random.choice(external or [random.choice(model.graph.initializer)])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    numbers = [str(random.choice(INTEGERS)), "x", ""]
    changes = {
        "location": (
            "../secret",
            "/etc/passwd",
            "secret",
            "tokenizer.json",
            "",
            "./model.onnx.data",
            "*/_ORT_MEM_ADDR_/*",
        ),
        "offset": (*numbers, "1", "4096"),
        "length": (*numbers, "1"),
    }
    key = random.choice(list(changes))
    entries = [entry for entry in tensor.external_data if entry.key == key]
    entry = random.choice(entries) if entries and random.random() < 0.8 else tensor.external_data.add(key=key)
    entry.value = random.choice(changes[key])


def _model(model: onnx.ModelProto, random: Random) -> None:
    kind = random.randrange(6)
    if kind == 0:
        model.ir_version = random.choice((0, 3, 14, 999, -1))
    elif kind == 1:
        random.choice(model.opset_import).version = random.choice((0, 1, 9, 21, 99, -1))
    elif kind == 2 and model.functions:
        function = random.choice(model.functions)
        function.name, function.domain = random.choice((("f", ""), (function.name, ""), ("Reshape", function.domain)))
    elif kind == 3 and model.functions:
        node = random.choice(model.functions)  # a function that calls itself
        node.node.add().CopyFrom(helper.make_node(node.name, list(node.input), list(node.output), domain=node.domain))
    elif kind == 4:
        model.graph.name = random.choice(TEXTS[:5])
    else:
        inner = helper.make_graph([helper.make_node("Identity", ["logits"], ["z"])], "inner", [], [])
        model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))
