"""What of a model is quantized, and to what: a value that is the same text in a file, a checkpoint, an artifact.

    weights = "int4_g32"              # every linear layer of the decoder
    embedding = "int8"                # the table of the tokens
    head = "int8"                     # the layer that makes logits
    activations = "int8"              # their inputs, one scale a token; "int4": of ternary layers; absent: float
    attention = { logits = 8, qk = "int8", keys = "int4", values = "int4", window = 32 }    # absent: float

    [overrides]                       # by module name; * also matches dots; the last match wins
    "lm_head" = "int8"
    "model.layers.0.*" = "none"

A tied table, which is embedding and head at once, is stored once where both have one format (or both are float), and
twice where they differ. In a file, embedding and head are TABLE_FORMAT where weights have a format and nothing is said
of them; "none" leaves them float. Norms are never quantized. The lambda projection of diff_v2 is float unless an
override spells out its name ("*.lambda_proj"): few parameters, felt by every logit; an override reaches embedding and
head only by their names, too ("model.embed_tokens", "lm_head").

Of attention, logits are bits, with one scale a query row (attention.py); keys and values are what the KV cache holds:
fp16, int8, int4 or int2 (ops/kv_cache.py), of which the last two leave `window` recent tokens float16; qk, int8 or
int4, is what a query is rounded to, so that q k^T is a product of integers: keys have no more bits than it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .. import files
from ..errors import DiffbitError
from ..models import ModelConfig
from ..models.checkpoint.names import is_linear, shapes
from ..ops.cache import Buffer
from ..ops.kv_cache import BITS, BLOCK
from .formats import Format, parse_format

KEPT = ("embed_tokens", "lm_head", "lambda_proj")  # reached by an override that names them
TABLE_FORMAT = "int8"  # of embedding and head beside low-bit weights: docs/accuracy.md measures what others cost
LOGIT_BITS = range(2, 17)
QK = ("int8", "int4")
KV = ("int8", "int4", "int2")
HELD = ("fp16", *KV)  # by a KV cache
WINDOW = 32  # tokens
MOST_WINDOW = 1 << 20
EMBEDDING_MODULE = "model.embed_tokens"
HEAD_MODULE = "lm_head"


@dataclass(frozen=True)
class AttentionScheme:
    """logits: bits of the attention logits, 2 to 16. qk: "int8" or "int4", what a query is rounded to. keys, values:
    "fp16", "int8", "int4" or "int2", what the KV cache holds. Each None: float. window: tokens, at least, that stay
    float16 at the end of a cache of less than 8 bits."""

    logits: int | None = None
    qk: str | None = None
    keys: str | None = None
    values: str | None = None
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.logits is not None and (type(self.logits) is not int or self.logits not in LOGIT_BITS):
            raise DiffbitError(
                f"attention logits are to have {self.logits!r} bits, wanted a whole number from {LOGIT_BITS[0]} to "
                f"{LOGIT_BITS[-1]}"
            )
        for name, format, wanted in (("qk", self.qk, QK), ("keys", self.keys, HELD), ("values", self.values, HELD)):
            if format is not None and format not in wanted:
                raise DiffbitError(f"attention's {name} is {format!r}, wanted one of {', '.join(wanted)} or none")
        if type(self.window) is not int or not 0 <= self.window <= MOST_WINDOW:
            raise DiffbitError(
                f"the KV cache's window is {self.window!r}, wanted a whole number from 0 to {MOST_WINDOW}: the most "
                "recent tokens, which stay float16"
            )

    @property
    def query_bits(self) -> int:
        """Bits that a query is rounded to; 0: it is not."""
        return 0 if self.qk is None else BITS[self.qk]

    @property
    def key_format(self) -> str:
        """ "float" or one of HELD: the smaller of what the cache and the product are to have."""
        return min((self.keys or "float", self.qk or "float"), key=BITS.__getitem__)

    @property
    def value_format(self) -> str:
        return self.values or "float"

    @property
    def has_window(self) -> bool:
        """Does the cache leave recent tokens as they came?"""
        return any(BITS[format] < 8 for format in (self.key_format, self.value_format))

    def check(self, config: ModelConfig) -> None:
        """A DiffbitError where a model's heads cannot be held in the cache's formats."""

        def kv(heads: int, width: int, in_place: str, sliding_window: int) -> tuple[Buffer, ...]:
            for name, format in (("keys", self.key_format), ("values", self.value_format)):
                if BITS[format] < 8 and width % BLOCK:
                    raise DiffbitError(
                        f"{name} cannot be {format}: heads are {width} wide, wanted a multiple of {BLOCK}; use int8"
                    )
            return ()

        for mixer in {layer.mixer for layer in config.layers}:
            mixer.buffers(kv)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: what is not float."""
        found = {name: getattr(self, name) for name in ("logits", "qk", "keys", "values")}
        found = {name: value for name, value in found.items() if value is not None}
        if self.has_window:
            found["window"] = self.window
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionScheme:
        _known(values, tuple(field.name for field in fields(cls)), "a scheme's attention")
        formats: dict[str, Any] = {name: None if value == "none" else value for name, value in values.items()}
        return cls(**formats)


@dataclass(frozen=True)
class Scheme:
    """The formats of linear layers, embedding and head (None: float), activations ("int8", "int4" or None), attention,
    ((glob, format), ...).

    A ternary layer rounds its input in any case: to 4 bits where activations are "int4" (rounding.py), else to 8.
    """

    weights: Format | None = None
    embedding: Format | None = None
    head: Format | None = None
    activations: str | None = None
    attention: AttentionScheme = AttentionScheme()
    overrides: tuple[tuple[str, Format | None], ...] = ()

    def __post_init__(self) -> None:
        if self.activations not in (None, "int8", "int4"):
            raise DiffbitError(f"activations are {self.activations!r}, wanted 'int8', 'int4' or nothing")
        if self.activations == "int4":
            self._check_int4()
        globs = [glob for glob, _ in self.overrides]
        if twice := [glob for glob in globs if globs.count(glob) > 1]:  # in a file it is a key
            raise DiffbitError(f"override {twice[0]!r} is given twice; leave one of them out")

    def _check_int4(self) -> None:
        """int4 activations are TernaryMatMul's alone: a DiffbitError where another format is to meet them."""
        named = [("the scheme", self.weights), *((f"override {glob!r}", format) for glob, format in self.overrides)]
        nothing = all(format is None for _, format in named)
        for what, format in named:
            if nothing if format is None else "int4" not in format.activations:
                raise DiffbitError(
                    f"activations 'int4' go with ternary weights alone, and {what} asks for {_name(format)}; make all "
                    "that is quantized ternary, or ask for activations 'int8'"
                )

    def format_for(self, module: str) -> Format | None:
        """The format of a linear layer by its name, such as "model.layers.0.self_attn.q_proj"; None is float."""
        for glob, format in reversed(self.overrides):
            if _reaches(glob, module):
                return format
        if module in (EMBEDDING_MODULE, HEAD_MODULE):
            return self.embedding if module == EMBEDDING_MODULE else self.head
        return None if module.rpartition(".")[2] in KEPT else self.weights

    def overridden(self, module: str) -> bool:
        """Does an override reach this linear layer?"""
        return any(_reaches(glob, module) for glob, _ in self.overrides)

    def keeps_tied(self, config: ModelConfig) -> bool:
        """Are embedding and head of such a model one table, and stay one?"""
        return config.tie_embeddings and self.format_for(EMBEDDING_MODULE) == self.format_for(HEAD_MODULE)

    def formats(self, config: ModelConfig) -> dict[str, Format]:
        """{module: format} of all weights that are quantized in such a model, in the model's order: the embedding,
        linear layers, the head where it has a weight of its own.

        A DiffbitError where an override reaches no layer, or a format cannot hold a layer's shape.
        """
        self.attention.check(config)
        layers = weight_shapes(config)
        for glob, _ in self.overrides:
            if not any(_reaches(glob, module) for module in layers):
                raise DiffbitError(
                    f"override {glob!r} matches no linear layer of this model; they are named like "
                    f"{list(layers)[1]} and lm_head, the embedding model.embed_tokens (norms cannot be quantized)"
                )
        chosen = {module: format for module in layers if (format := self.format_for(module)) is not None}
        if self.keeps_tied(config):
            chosen.pop(HEAD_MODULE, None)
        for module, format in chosen.items():
            try:
                (format.check_table if module == EMBEDDING_MODULE else format.check)(layers[module])
            except DiffbitError as error:
                raise DiffbitError(f"{module}: {error}") from None
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; `from_dict` is its inverse."""
        return {
            "weights": _name(self.weights),
            "embedding": _name(self.embedding),
            "head": _name(self.head),
            "activations": self.activations,
            "attention": self.attention.to_dict(),
            "overrides": {glob: _name(format) for glob, format in self.overrides},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scheme:
        """The inverse of `to_dict`; what is missing is float. A DiffbitError names what is wrong."""
        _known(values, ("weights", "embedding", "head", "activations", "attention", "overrides"), "a scheme")
        overrides = _table(values, "overrides").items()
        activations = values.get("activations")
        return cls(
            **{name: _format(values.get(name), name) for name in ("weights", "embedding", "head")},
            activations=None if activations == "none" else activations,
            attention=AttentionScheme.from_dict(_table(values, "attention")),
            overrides=tuple((glob, _format(value, f"override {glob!r}")) for glob, value in overrides),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Scheme:
        """A scheme from a .json or .toml file, embedding and head as `table_formats` says."""
        path = Path(path)
        if path.suffix == ".json":
            values = files.read_json(path)
        elif path.suffix == ".toml":
            values = _read_toml(path)
        else:
            raise DiffbitError(f"{path}: wanted a .json or a .toml file to read a scheme from")
        try:
            given = cls.from_dict(values)
            low_bit = given.weights is not None
            embedding, head = table_formats(low_bit, values.get("embedding"), values.get("head"))
            return replace(given, embedding=embedding, head=head)
        except DiffbitError as error:
            raise DiffbitError(f"{path}: {error}") from None

    def to_file(self, path: str | Path) -> None:
        """Write a .json or .toml file that `from_file` reads."""
        path = Path(path)
        if path.suffix == ".json":
            files.write_json(path, self.to_dict())
        elif path.suffix == ".toml":
            with files.write_atomic(path) as temporary:
                temporary.write_text(self._toml(), encoding="utf-8")
        else:
            raise DiffbitError(f"{path}: wanted a .json or a .toml file to write a scheme to")

    def _toml(self) -> str:
        # a JSON string is a TOML basic string, but for DEL, which no module name holds
        names = {"weights": self.weights, "embedding": self.embedding, "head": self.head}
        lines = [f"{name} = {json.dumps(_name(format))}" for name, format in names.items()]
        if self.activations is not None:
            lines.append(f"activations = {json.dumps(self.activations)}")
        if attention := self.attention.to_dict():
            entries = ", ".join(f"{name} = {json.dumps(value)}" for name, value in attention.items())
            lines.append(f"attention = {{ {entries} }}")
        if self.overrides:
            lines += ["", "[overrides]"]
        lines += [f"{json.dumps(glob)} = {json.dumps(_name(format))}" for glob, format in self.overrides]
        return "\n".join(lines) + "\n"


def table_formats(low_bit: bool, embedding: str | None, head: str | None) -> tuple[Format | None, Format | None]:
    """Of embedding and head, from what a user said of them; None, nothing: TABLE_FORMAT beside `low_bit` weights, float
    beside float ones."""
    default = TABLE_FORMAT if low_bit else None
    return (
        _format(default if embedding is None else embedding, "embedding"),
        _format(default if head is None else head, "head"),
    )


def parse_override(text: str) -> tuple[str, Format | None]:
    """ "GLOB=FORMAT" or "GLOB=none", as the command line takes it -> (glob, format)."""
    glob, equals, value = text.rpartition("=")
    if not (glob and equals and value):
        raise DiffbitError(f"override {text!r}: wanted GLOB=FORMAT or GLOB=none, such as 'lm_head=int8'")
    return glob, _format(value, f"override {text!r}")


def parse_kv(text: str) -> dict[str, str | None]:
    """What a KV cache is to hold, as the command line takes it: "int4", or "int8,int4" for keys, values; or "none"."""
    names = [None if name.strip() in ("none", "float") else name.strip() for name in text.split(",")]
    if len(names) > 2:
        raise DiffbitError(f"a KV cache of {text!r}: wanted one format, or two for keys and values, such as int8,int4")
    return {"keys": names[0], "values": names[-1]}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """{name: (out_features, in_features)} of every linear layer, the head included where it shares the embedding."""
    found = {
        name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes(config).items() if is_linear(name)
    }
    return found | {HEAD_MODULE: (config.vocab_size, config.hidden_size)}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The same and the embedding, [vocab_size, hidden_size], in the model's order."""
    return {EMBEDDING_MODULE: (config.vocab_size, config.hidden_size)} | linear_shapes(config)


def _reaches(glob: str, module: str) -> bool:
    layer = module.rpartition(".")[2]
    return fnmatchcase(module, glob) and (layer not in KEPT or layer in glob)


def _name(format: Format | None) -> str:
    return "none" if format is None else format.name


def _format(value: Any, what: str) -> Format | None:
    if value in (None, "none"):
        return None
    if not isinstance(value, str):
        raise DiffbitError(f"{what} is {value!r}, wanted the name of a format, such as 'int4_g32', or 'none'")
    try:
        return parse_format(value)
    except DiffbitError as error:
        raise DiffbitError(f"{what}: {error}") from None


def _known(values: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    for name in values:
        if name not in names:
            raise DiffbitError(f"{what} has the unknown key {name!r}, wanted one of {', '.join(names)}")


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name) or {}
    if not isinstance(value, Mapping):
        raise DiffbitError(f"{name} is {value!r}, wanted a table")
    return value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DiffbitError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise DiffbitError(f"{path}: is not valid TOML ({error})") from None
