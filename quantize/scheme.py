"""Schemes: which parts of a model are quantized, and to which formats. Files, checkpoints and artifacts all hold one.

    weights = "int4_g32"              # every linear layer of the decoder
    embedding = "int8"                # the token embedding
    head = "int8"                     # the output layer
    activations = "int8"              # inputs of these layers, one scale per token; "int4": ternary only; absent: float
    attention = { logits = 8, qk = "int8", keys = "int4", values = "int4", window = 32, first = 4 }  # absent: float

    [overrides]                       # by module name; * also matches dots; the last match wins
    "lm_head" = "int8"
    "model.layers.0.*" = "none"

A tied table, shared by embedding and head, is stored once if both have the same format (or both are float), else twice.
In a file, embedding and head default to TABLE_FORMAT if weights have a format; "none" leaves them float. Norms are
never quantized. Linear layers that a mixer keeps float (`MixerOptions.float_linears`), such as diff_v2's lambda_proj,
are quantized only if an override spells out the name ("*.lambda_proj"). The same holds for overrides of the embedding
and the head ("model.embed_tokens", "lm_head").

In `attention`, logits and probabilities (the softmax maps) are numbers of bits, with one scale per query row
(attention.py); both are for comparisons in torch. keys and values are the formats
of the KV cache: fp16, int8, int4, int3 or int2 (ops/kv_cache.py); the last three keep the `first` and at least `window`
recent tokens in float16. layers = { 0 = "int8,int4" } gives a layer other formats, for keys and for values. qk, int8 or
int4, is the format of queries, so that q k^T is a product of integers; keys have at most as many bits. states = "int8"
is for recurrent layers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from ..formats import Format, parse_format
from ..io import files, plugins
from ..io.errors import DiffbitError
from ..io.fields import Rule, bounds, check, get, located, one_of, read, shown
from ..models import ModelConfig
from ..models.checkpoint.names import is_linear, shapes
from ..ops.cache import Buffer
from ..ops.kv_cache import BITS, BLOCK, MAX_FIRST

TABLE_FORMAT = "int8"  # default of embedding and head with low-bit weights; research/weights compares others
FINE_TABLES = ("int8_g32", "int8_g64", "int8_g128")  # weights of these formats have embedding and head of the same
LOGIT_BITS = range(2, 17)
ACTIVATIONS = ("int8", "int4")
QK = ("int8", "int4")
KV = ("int8", "int4", "int3", "int2")
CACHED = ("fp16", *KV)  # formats of a KV cache
WINDOW, FIRST = 32, 4  # tokens
MOST_WINDOW = 1 << 20
EMBEDDING_MODULE = "model.embed_tokens"
HEAD_MODULE = "lm_head"
VERSION = 1  # of the quantization_config in a checkpoint
TABLES = (EMBEDDING_MODULE, HEAD_MODULE)
CacheFormat = Annotated[str, one_of(*CACHED)] | None
LayerNumber = Annotated[int, bounds(0, 99_999)]
LayerText = Annotated[str, Rule("the number of a layer, such as 0", re.compile("0|[1-9][0-9]{0,4}").fullmatch)]


@dataclass(frozen=True)
class AttentionScheme:
    """logits, probabilities: bits of the attention logits and of each softmax map, 2 to 16. qk: format of queries,
    "int8" or "int4". keys, values: formats of the KV cache, "fp16", "int8", "int4", "int3" or "int2". states: format of
    what a recurrent layer keeps, "int8". None: float. window, first: the least number of recent tokens, and the number
    of first tokens, that a cache of fewer than 8 bits keeps in float16. layers: (layer, keys, values), other formats of
    the cache of some layers; `of_layer` returns the scheme of one, and key_format and value_format are those of the
    layers that are not named."""

    logits: Annotated[int, bounds(LOGIT_BITS[0], LOGIT_BITS[-1])] | None = None
    qk: Annotated[str, one_of(*QK)] | None = None
    keys: CacheFormat = None
    values: CacheFormat = None
    window: Annotated[int, bounds(0, MOST_WINDOW)] = WINDOW
    first: Annotated[int, bounds(0, MAX_FIRST)] = FIRST
    states: Annotated[str, one_of("int8")] | None = None
    probabilities: Annotated[int, bounds(LOGIT_BITS[0], LOGIT_BITS[-1])] | None = None
    layers: tuple[tuple[LayerNumber, CacheFormat, CacheFormat], ...] = ()

    def __post_init__(self) -> None:
        check(self, "attention")
        numbers = [layer for layer, _, _ in self.layers]
        if numbers != sorted(set(numbers)):
            raise DiffbitError(f"attention.layers names the layers {numbers}, wanted each once, in order")

    def of_layer(self, index: int) -> AttentionScheme:
        """Return the scheme of one layer; where it reads the cache of another one, index is that one's."""
        for layer, keys, values in self.layers:
            if layer == index:
                return replace(self, keys=keys, values=values, layers=())
        return replace(self, layers=()) if self.layers else self

    def of_model(self, config: ModelConfig) -> list[AttentionScheme]:
        """Return the scheme of each layer of a model."""
        readers = enumerate(layer.mixer.reads for layer in config.layers)
        return [self.of_layer(index if giver is None else giver) for index, giver in readers]

    def with_float(self, format: str) -> AttentionScheme:
        """Return the scheme with a format, "fp16", in place of keys and values that it leaves in float."""
        layers = tuple((layer, keys or format, values or format) for layer, keys, values in self.layers)
        return replace(self, keys=self.keys or format, values=self.values or format, layers=layers)

    @property
    def query_bits(self) -> int:
        """Return the bits of a query; 0: it is not rounded."""
        return 0 if self.qk is None else BITS[self.qk]

    @property
    def key_format(self) -> str:
        """Return "float" or one of CACHED: the smaller of the cache's format and the product's."""
        return min((self.keys or "float", self.qk or "float"), key=BITS.__getitem__)

    @property
    def value_format(self) -> str:
        return self.values or "float"

    @property
    def is_low_bit(self) -> bool:
        """Whether keys or values of some layer are low-bit, which needs diffbit's own operator for every attention
        variant."""
        return any(format != "float" for format in self._formats())

    @property
    def has_window(self) -> bool:
        """Whether the cache of some layer keeps recent tokens, and the first ones, in float16."""
        return any(BITS[format] < 8 for format in self._formats())

    def _formats(self) -> set[str]:
        schemes = [self, *(self.of_layer(layer) for layer, _, _ in self.layers)]
        return {format for scheme in schemes for format in (scheme.key_format, scheme.value_format)}

    def first_tokens(self, sliding_window: int) -> int:
        """Return how many first tokens a layer's cache keeps in float16; a sliding window drops them."""
        return self.first if self.has_window and not sliding_window else 0

    def check(self, config: ModelConfig) -> None:
        """Raise DiffbitError if a model's heads do not fit the cache's formats, or `layers` names a layer that has no
        cache of keys and values."""
        cached = set()

        def kv(
            index: int, scheme: AttentionScheme, heads: int, width: int, in_place: str, sliding_window: int
        ) -> tuple[Buffer, ...]:
            cached.add(index)
            for name, format in (("keys", scheme.key_format), ("values", scheme.value_format)):
                if BITS[format] < 8 and width % BLOCK:
                    raise DiffbitError(
                        f"{name} cannot be {format}: heads are {width} wide, wanted a multiple of {BLOCK}; use int8"
                    )
            return ()

        schemes = zip(config.layers, self.of_model(config), strict=True)
        fixed = [layer.mixer.buffers(partial(kv, index, scheme)) for index, (layer, scheme) in enumerate(schemes)]
        for index, _, _ in self.layers:
            if index not in cached:
                raise DiffbitError(
                    f"attention.layers names layer {index}, which has no keys and values of its own in this model of "
                    f"{config.num_layers} layers; leave it out"
                )
        if self.states and not any(map(len, fixed)):
            raise DiffbitError(
                f"states cannot be {self.states}: the model has none of a fixed size; use --kv for its cache"
            )

    def describe(self) -> str:
        """Return what is not float, in words: "keys int4, values int2, other formats in 3 layers, window 32"."""
        values = self.to_dict()
        count = len(values.pop("layers", ()))
        parts = [f"{name} {value}" for name, value in values.items()]
        if count:
            place = sum(name in ("logits", "probabilities", "qk", "keys", "values") for name in values)
            parts.insert(place, f"other formats in {count} layer{'s' * (count > 1)}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not float, as plain JSON."""
        values = {name: getattr(self, name) for name in ("logits", "probabilities", "qk", "keys", "values", "states")}
        values = {name: value for name, value in values.items() if value is not None}
        layers = {str(layer): f"{keys or 'none'},{values or 'none'}" for layer, keys, values in self.layers}
        values |= {"layers": layers} if layers else {}
        return values | ({"window": self.window, "first": self.first} if self.has_window else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionScheme:
        layers = get(values, "layers", Mapping[LayerText, str], {}, "attention")
        formats = {int(layer): parse_kv(text) for layer, text in layers.items()}
        values = _without_words_for_none(values) | {
            "layers": tuple((layer, kv["keys"], kv["values"]) for layer, kv in sorted(formats.items()))
        }
        scheme: AttentionScheme = read(cls, values, "attention")
        return scheme


def _format(value: object, place: str) -> Format | None:
    if value in (None, "none"):
        return None
    if not isinstance(value, str):
        raise DiffbitError(f"{place} is {shown(value)}, wanted the name of a format, such as 'int4_g32', or 'none'")
    with located(place):
        return parse_format(value)


FormatOrNone = Annotated[Format | None, _format]


@dataclass(frozen=True)
class Scheme:
    """Formats of linear layers, embedding and head (None: float), activations ("int8", "int4" or None), attention, and
    overrides ((glob, format), ...).

    A ternary layer always rounds its input: to 4 bits if activations are "int4" (formats/rounding.py), else to 8.
    """

    weights: FormatOrNone = None
    embedding: FormatOrNone = None
    head: FormatOrNone = None
    activations: Annotated[str, one_of(*ACTIVATIONS)] | None = None
    attention: AttentionScheme = AttentionScheme()
    overrides: tuple[tuple[str, FormatOrNone], ...] = ()

    def __post_init__(self) -> None:
        check(self)
        if self.activations == "int4":
            self._check_int4()
        globs = [glob for glob, _ in self.overrides]
        if twice := [glob for glob in globs if globs.count(glob) > 1]:  # globs are keys in a file
            raise DiffbitError(f"override {twice[0]!r} is given twice; leave one of them out")

    def _check_int4(self) -> None:
        """Raise DiffbitError if int4 activations, which only TernaryMatMul supports, are used with another format."""
        named = [("the scheme", self.weights), *((f"override {glob!r}", format) for glob, format in self.overrides)]
        all_float = all(format is None for _, format in named)
        for what, format in named:
            if all_float if format is None else "int4" not in format.activations:
                raise DiffbitError(
                    f"activations 'int4' need ternary weights, but {what} has {_name(format)}; use ternary for all "
                    "quantized weights, or activations 'int8'"
                )

    def check_offered(self) -> Scheme:
        """Return the scheme that a user chose, unless it has a format that only other libraries' checkpoints need."""
        for format in self._all_formats():
            if format is not None:
                format.check_offered()
        return self

    def format_for(self, module: str, float_linears: Container[str] = ()) -> Format | None:
        """Return the format of a linear layer, such as "model.layers.0.self_attn.q_proj", or of the embedding; None:
        float. float_linears: the model's linear layers that are quantized only by name."""
        for glob, format in reversed(self.overrides):
            if _reaches(glob, module, float_linears):
                return format
        if module in TABLES:
            return self.embedding if module == EMBEDDING_MODULE else self.head
        return None if module in float_linears else self.weights

    def chosen(self, config: ModelConfig) -> dict[str, Format]:
        """Return {module: format} of the linear layers and the embedding, in the model's order, without checking them;
        a tied head is listed as well."""
        floats = float_linears(config)
        formats = {module: self.format_for(module, floats) for module in weight_shapes(config)}
        return {module: format for module, format in formats.items() if format is not None}

    def overridden(self, config: ModelConfig) -> list[str]:
        """Return the linear layers, and the embedding, that an override matches."""
        floats = float_linears(config)
        return [
            name for name in weight_shapes(config) if any(_reaches(glob, name, floats) for glob, _ in self.overrides)
        ]

    def without_override(self, config: ModelConfig) -> list[str]:
        """Return the linear layers whose format is `weights`: no override matches them, and they are neither the head
        nor kept float by their mixer."""
        others = {HEAD_MODULE, *float_linears(config), *self.overridden(config)}
        return [module for module in linear_shapes(config) if module not in others]

    def tables_without_override(self, config: ModelConfig) -> list[str]:
        """Return the embedding and the head, unless an override matches them; a tied table only if none matches."""
        free = [table for table in TABLES if not any(_reaches(glob, table, ()) for glob, _ in self.overrides)]
        return free if len(free) == len(TABLES) or not self.keeps_tied(config) else []

    def keeps_tied(self, config: ModelConfig) -> bool:
        """Whether the model ties embedding and head, and the scheme keeps them tied."""
        return config.tie_embeddings and self.format_for(EMBEDDING_MODULE) == self.format_for(HEAD_MODULE)

    def formats(self, config: ModelConfig) -> Mapping[str, Format]:
        """Return {module: format} of all quantized weights of a model, in the model's order: the embedding, the linear
        layers, and the head unless it is tied.

        Raises DiffbitError if an override matches no layer, or a format cannot hold a layer's shape.
        """
        self.attention.check(config)
        layers, floats = weight_shapes(config), float_linears(config)
        for glob, _ in self.overrides:
            if not any(_reaches(glob, module, floats) for module in layers):
                raise DiffbitError(
                    f"override {glob!r} matches no linear layer of this model; wanted a name such as "
                    f"{list(layers)[1]}, lm_head, or model.embed_tokens for the embedding (norms cannot be quantized)"
                )
        chosen = self.chosen(config)
        if self.keeps_tied(config):
            chosen.pop(HEAD_MODULE, None)
        for module, format in chosen.items():
            with located(module):
                (format.check_table if module == EMBEDDING_MODULE else format.check)(layers[module])
        return MappingProxyType(chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as plain JSON; `from_dict` is the inverse."""
        return {
            "weights": _name(self.weights),
            "embedding": _name(self.embedding),
            "head": _name(self.head),
            "activations": self.activations,
            "attention": self.attention.to_dict(),
            "overrides": {glob: _name(format) for glob, format in self.overrides},
            **({"packages": packages} if (packages := self._packages()) else {}),
        }

    def _packages(self) -> dict[str, str]:
        """Return {format: the installed package that adds it}."""
        packages = {_name(format): plugins.package_of(format) for format in self._all_formats()}
        return {name: package for name, package in packages.items() if package is not None}

    def _all_formats(self) -> tuple[Format | None, ...]:
        return self.weights, self.embedding, self.head, *(format for _, format in self.overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scheme:
        """Invert `to_dict`; missing fields mean float. A DiffbitError names an invalid field or a missing package."""
        for name, package in get(values, "packages", Mapping[str, plugins.PackageName], {}).items():
            try:
                parse_format(name)
            except DiffbitError:
                raise plugins.missing(f"number format {name!r}", package) from None
        values = {field: value for field, value in values.items() if field != "packages"}
        attention = AttentionScheme.from_dict(get(values, "attention", Mapping[str, Any], {}))
        overrides = get(values, "overrides", Mapping[str, FormatOrNone], {})
        values = _without_words_for_none(values) | {"attention": attention, "overrides": tuple(overrides.items())}
        scheme: Scheme = read(cls, values, "")
        return scheme

    def to_entry(self) -> dict[str, Any]:
        """Return the quantization_config of a checkpoint in diffbit's own layout (layouts/diffbit.py)."""
        return {"quantizer": "diffbit", "version": VERSION, "scheme": self.to_dict()}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], where: str) -> Scheme:
        """Return the scheme of a quantization_config that diffbit wrote; where: its file and key, for messages."""
        if entry.get("version") != VERSION:
            raise DiffbitError(
                f"{where} has version {shown(entry.get('version'))}, this diffbit reads version {VERSION}; quantize "
                "the float checkpoint again"
            )
        values = get(entry, "scheme", Mapping[str, Any], place=where)
        with located(f"{where}.scheme"):
            return cls.from_dict(values)

    @classmethod
    def from_file(cls, path: str | Path) -> Scheme:
        """Read a scheme from a .json or .toml file; `table_formats` gives the defaults of embedding and head."""
        path = Path(path)
        if path.suffix == ".json":
            values = files.read_json(path)
        elif path.suffix == ".toml":
            values = _read_toml(path)
        else:
            raise DiffbitError(f"{path}: wanted a .json or a .toml file to read a scheme from")
        with located(path):
            scheme = cls.from_dict(values)
            low_bit = scheme.weights is not None
            embedding, head = table_formats(low_bit, values.get("embedding"), values.get("head"), scheme.weights)
            return replace(scheme, embedding=embedding, head=head).check_offered()


def table_formats(
    low_bit: bool, embedding: str | None, head: str | None, weights: Format | None = None
) -> tuple[Format | None, Format | None]:
    """Return the formats of embedding and head from the user's names. None means the default: that of the weights if
    it is one of FINE_TABLES, else TABLE_FORMAT if the weights are low-bit, else float."""
    default = None if not low_bit else str(weights) if str(weights) in FINE_TABLES else TABLE_FORMAT
    return (
        _format(default if embedding is None else embedding, "embedding"),
        _format(default if head is None else head, "head"),
    )


def parse_override(text: str) -> tuple[str, Format | None]:
    """Parse "GLOB=FORMAT" or "GLOB=none" from the command line into (glob, format)."""
    glob, equals, value = text.rpartition("=")
    if not (glob and equals and value):
        raise DiffbitError(f"override {text!r}: wanted GLOB=FORMAT or GLOB=none, such as 'lm_head=int8'")
    return glob, _format(value, f"override {text!r}")


def parse_kv(text: str) -> dict[str, str | None]:
    """Parse the KV cache's formats from the command line: "int4", "int8,int4" for keys and values, or "none"."""
    names = [None if name.strip() in ("none", "float") else name.strip() for name in text.split(",")]
    if len(names) > 2:
        raise DiffbitError(f"a KV cache of {text!r}: wanted one format, or two for keys and values, such as int8,int4")
    return {"keys": names[0], "values": names[-1]}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return {name: (out_features, in_features)} of every linear layer, including a tied head."""
    linear = {name.removesuffix(".weight"): shape for name, shape in shapes(config).items() if is_linear(name)}
    by_name = {name: (shape[0], shape[1]) for name, shape in linear.items()}
    return by_name | {HEAD_MODULE: (config.vocab_size, config.hidden_size)}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return `linear_shapes` and the embedding's shape, (vocab_size, hidden_size), in the model's order."""
    return {EMBEDDING_MODULE: (config.vocab_size, config.hidden_size)} | linear_shapes(config)


def float_linears(config: ModelConfig) -> frozenset[str]:
    """Return the linear layers that mixers keep float unless an override names them."""
    return frozenset(
        f"model.layers.{index}.self_attn.{name}"
        for index, layer in enumerate(config.layers)
        for name in layer.mixer.float_linears
    )


def _reaches(glob: str, module: str, float_linears: Container[str]) -> bool:
    """Whether an override's glob matches a module; some match only if the glob has the layer's own name."""
    by_name = module in TABLES or module in float_linears
    return fnmatchcase(module, glob) and (not by_name or module.rpartition(".")[2] in glob)


def _name(format: Format | None) -> str:
    return "none" if format is None else format.name


def _without_words_for_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value == "none" else value for name, value in values.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DiffbitError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise DiffbitError(f"{path}: is not valid TOML ({error})") from None
