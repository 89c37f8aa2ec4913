"""Converts SentencePiece tokenizers to tokenizer.json: BPE with byte fallback, and Unigram (arXiv 1808.06226).

The library `sentencepiece` reads a `tokenizer.model` as LlamaTokenizer saves it. That file determines the algorithm,
the normalisation and the byte fallback. tokenizer_config.json sets what transformers reads from there:

    add_bos_token, add_eos_token    tokens added around a text; default: only bos
    add_prefix_space                whether to add a space before a text; default: the model's setting
    legacy                          true (default): also adds a space to a text after a special token, and to one that
                                    begins with a space, as SentencePiece does; false: as LlamaTokenizer since
                                    transformers pull request 24565
    added_tokens_decoder, *_token   further tokens and their names

The ids equal those of transformers up to 4.57 and of sentencepiece. transformers 5 reads a Unigram model of
LlamaTokenizer as a BPE, assumes legacy false, and adds no second space before a text that begins with one. If the model
has a table of normalised characters, `tokenizers` treats "\\r\\n" as one character, sentencepiece as two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DiffbitError, needs
from .files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SENTENCEPIECE = "tokenizer.model"
CONFIG = "tokenizer_config.json"
CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
CONTROL, USER_DEFINED = 3, 4  # SentencePiece.Type of pieces that are matched as a whole


def from_sentencepiece(file: Path) -> bytes:
    """Convert a tokenizer.model, with the options in the files beside it, to the bytes of a tokenizer.json."""
    config = _beside(file, "special_tokens_map.json") | _beside(file, CONFIG)
    if config.get("tokenizer_class") not in CLASSES:
        raise DiffbitError(
            f"{file.parent / CONFIG}: tokenizer_class is {config['tokenizer_class']!r}, wanted LlamaTokenizer; save "
            "the tokenizer with transformers, which writes a tokenizer.json"
        )
    proto = _read(file)
    try:
        backend = _tokenizer(proto, config)
        _add_tokens(backend, proto, config | {"added": _beside(file, "added_tokens.json")})
    except DiffbitError as error:
        raise DiffbitError(f"{file}: {error}") from None
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DiffbitError(
            f"{file}: it, or the tokens added in {CONFIG}, cannot be converted ({error!r}); restore it"
        ) from None
    return str(backend.to_str(pretty=True)).encode()


def _beside(file: Path, name: str) -> dict[str, Any]:
    return read_json(file.with_name(name)) if file.with_name(name).is_file() else {}


def _read(file: Path) -> Any:
    """Return the ModelProto in a tokenizer.model. Raises DiffbitError if sentencepiece cannot load the file."""
    with needs("sentencepiece (and protobuf)", "lab", f"converting {file}"):
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    try:
        data = file.read_bytes()
        SentencePieceProcessor().LoadFromSerializedProto(data)
        proto = sentencepiece_model_pb2.ModelProto.FromString(data)  # type: ignore[attr-defined]  # made at import
    except Exception as error:  # RuntimeError, protobuf's DecodeError, OSError
        reason = " ".join(str(error).split())
        raise DiffbitError(f"{file}: is not a SentencePiece model ({reason}); copy the file again") from None
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise DiffbitError(f"{file}: is a SentencePiece model of words or characters, wanted BPE or Unigram")
    return proto


def _tokenizer(proto: Any, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, normalizers

    trained, normal = proto.trainer_spec, proto.normalizer_spec
    pieces, scores = [piece.piece for piece in proto.pieces], [piece.score for piece in proto.pieces]
    unknown, fallback = trained.unk_id, trained.byte_fallback
    if trained.model_type == BPE:
        options = {"fuse_unk": True, "byte_fallback": fallback, "unk_token": pieces[unknown]}
        backend = Tokenizer(bpe(pieces, merges(pieces, scores), **options))
    else:
        vocabulary = list(zip(pieces, scores, strict=True))
        backend = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=fallback))
    prefix = config.get("add_prefix_space")
    prefix = normal.add_dummy_prefix if prefix is None else bool(prefix)
    before: list[Any] = []
    if normal.precompiled_charsmap:
        before.append(normalizers.Precompiled(normal.precompiled_charsmap))
    if normal.remove_extra_whitespaces:
        before += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    spaces(backend, prefix=prefix, legacy=config.get("legacy") is not False, before=before)
    return backend


def merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, ordered by its score, the highest first."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    pairs = []
    for piece, score in zip(pieces, scores, strict=True):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        splits = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs += [(score, *pair) for pair in sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [(left, right) for _, left, right in pairs]


def bpe(tokens: Sequence[str], pairs: Sequence[tuple[str, str]], **options: Any) -> Any:
    """Return a BPE model of `tokenizers`. Raises DiffbitError (without a file name) if a token occurs twice."""
    from tokenizers import models

    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise DiffbitError(f"its tokenizer holds the token {twice!r} twice")
    try:
        return models.BPE(vocab=ids, merges=pairs, **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise DiffbitError(f"its tokenizer is damaged ({error}); copy the file again") from None


def spaces(backend: Tokenizer, *, prefix: bool, legacy: bool, before: Sequence[Any] = ()) -> None:
    """Make the tokenizer encode a space as \u2581 and, with `prefix`, add one before a text. Decoding reverses this.

    before: normalizers that run first.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    if legacy:
        prepended = [normalizers.Prepend("\u2581")] if prefix else []
        before = [*before, *prepended, normalizers.Replace(" ", "\u2581")]
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    if before:
        backend.normalizer = normalizers.Sequence(list(before))
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, *strip])


def _add_tokens(backend: Tokenizer, proto: Any, config: Mapping[str, Any]) -> None:
    """Add the tokens that are matched as a whole, and those that are put around a text."""
    from tokenizers import AddedToken

    trained = proto.trainer_spec
    named = {"unk": trained.unk_piece, "bos": trained.bos_piece, "eos": trained.eos_piece}
    named = {name: _content(config.get(f"{name}_token", piece)) for name, piece in named.items()}
    further = {int(id): dict(token) for id, token in (config.get("added_tokens_decoder") or {}).items()}
    further |= {id: {"content": token} for token, id in config["added"].items() if id not in further}
    for piece in proto.pieces:
        if piece.type in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL)])
    for id, token in sorted(further.items()):
        content = token.pop("content")
        flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in token}
        backend.add_tokens([AddedToken(content, special=bool(token.get("special", False)), **flags)])
        if backend.token_to_id(content) != id:
            raise DiffbitError(
                f"the added token {content!r} has id {id} in the folder, but {backend.token_to_id(content)} after "
                f"the pieces of {SENTENCEPIECE}; the files do not belong together"
            )
    known = [token for token in named.values() if token and backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in known])
    add = {"bos": config.get("add_bos_token", True), "eos": config.get("add_eos_token", False)}
    put_around(backend, {name: named[name] for name, added in add.items() if added and named[name] in known})


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def put_around(backend: Tokenizer, around: Mapping[str, str]) -> None:
    """Put the token around["bos"] before each text and around["eos"] after it, if they are given."""
    from tokenizers import processors

    if around:
        single = [around.get("bos"), "$A", around.get("eos")]
        backend.post_processor = processors.TemplateProcessing(
            single=[piece for piece in single if piece],
            pair=[piece for piece in (*single, around.get("bos"), "$B:1", around.get("eos")) if piece],
            special_tokens=[(token, backend.token_to_id(token)) for token in around.values()],
        )
