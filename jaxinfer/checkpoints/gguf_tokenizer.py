"""A GGUF file's vocabulary as a Tokenizer (keys `tokenizer.ggml.*`; llama.cpp's docs/gguf.md and llama-vocab.cpp).

Byte-level BPE only (`tokenizer.ggml.model` = `gpt2`). How text is cut before merging is not in the file, only the name
of a kind (`tokenizer.ggml.pre`): `PRE_TOKENIZERS` has the patterns of each, as in the models' own tokenizer.json.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from gguf.constants import TokenType
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxinfer.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED, UNUSED = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED
MAX_TOKENS = 4 * 1024 * 1024

DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{ENDING}"
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{ENDING}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED_ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*|\p{{N}}|{CASED_ENDING}"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{CASED_ENDING}"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a kind cuts text: `patterns` one after another, each match becomes a piece of its own and so do the gaps.

    `ignore_merges`: a piece that is a token as a whole is taken without merging. `adds_bos` when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


KINDS: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (
        ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((DIGIT, GPT2)),
    ),
    (
        # smollm stands here as transformers reads it from GGUF. llama.cpp and the model's own tokenizer.json put it with
        # starcoder, which differs only at numerals outside ASCII: the merges hold no pair with an ASCII digit.
        ("smollm", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "exaone4", "mellum", "a.x-4.0"),
        PreTokenizer((GPT2,)),
    ),
    (
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    (
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((QWEN2,)),
    ),
    (("qwen35",), PreTokenizer((QWEN35,))),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((GPT4O,))),
    (("tekken",), PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True)),
    (("deepseek-coder",), PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+", DIGIT))),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", DEEPSEEK3))),
    (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"))),
    (("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((BLOOM,))),
    (("viking",), PreTokenizer((BLOOM, DIGIT))),
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
)
PRE_TOKENIZERS = {name: kind for names, kind in KINDS for name in names}


class VocabularyFields:
    """The `tokenizer.*` fields of one GGUF file, each checked for its type as it is read."""

    def __init__(self, header: GGUFHeader):
        self._metadata = header.metadata
        self.file = str(header.path)

    def error(self, key: str, message: str) -> CheckpointError:
        """A CheckpointError that names the file and the field."""
        return CheckpointError(message, file=self.file, field=key)

    def get(self, key: str, kind: type) -> Any:
        """A scalar field of this type, None when the file has none."""
        value = self._metadata.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise self.error(key, f"must be of type {kind.__name__}, got {value!r:.80}")
        return value

    def get_list(self, key: str, kind: type) -> list[Any] | None:
        """An array field with elements of this type, None when the file has none."""
        value = self._metadata.get(key)
        if value is not None and (not isinstance(value, list) or not all(isinstance(item, kind) for item in value)):
            raise self.error(key, f"must be an array of {kind.__name__}, got {value!r:.80}")
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """The id in `tokenizer.ggml.<name>_token_id`, None when the file has none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.get(key, int)
        if value is not None and not 0 <= value < num_tokens:
            raise self.error(key, f"must be from 0 to {num_tokens - 1}, got {value}")
        return value


def tokenizer_from_gguf(source: GGUFHeader | Path | str) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata, from its header or read from the file.

    Trailing tokens that the file marks as unused are padding rows of the model, not part of the vocabulary.

    Raises:
        UnsupportedModelError: naming a vocabulary model or pre-tokenizer kind that is not implemented.
        CheckpointError: naming file and field of metadata that is missing or damaged.
    """
    fields = VocabularyFields(source if isinstance(source, GGUFHeader) else read_gguf_header(Path(source)))
    model = fields.get("tokenizer.ggml.model", str)
    if model is None:
        raise fields.error("tokenizer.ggml.model", "is missing: the file holds no vocabulary")
    if model != "gpt2":
        raise UnsupportedModelError(f"{fields.file}: tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2' (byte-level BPE)")
    kind = _pre_tokenizer(fields)
    tokens, types = _tokens(fields)
    backend = tokenizers.Tokenizer(_bpe(fields, tokens, kind))
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in kind.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    for token_type, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [token for token, its_type in zip(tokens, types, strict=True) if its_type == token_type]
        backend.add_tokens([tokenizers.AddedToken(text, normalized=False, special=is_special) for text in texts])
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        token_id = fields.token_id(name, len(tokens))
        if token_id is not None:
            ids[name] = token_id
    _add_bos_eos(fields, backend, kind, tokens, ids)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        special_tokens={name: tokens[ids[key]] for key, name in names.items() if key in ids},
        eos_token_ids=[ids[key] for key in ("eos", "eot", "eom") if key in ids],
        chat_template=fields.get("tokenizer.chat_template", str),
    )


def _pre_tokenizer(fields: VocabularyFields) -> PreTokenizer:
    name = fields.get("tokenizer.ggml.pre", str)
    if name is None:
        logger.warning(
            "%s: tokenizer.ggml.pre is missing, 'default' is used: text may be cut differently from the model's training", fields.file
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{fields.file}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _tokens(fields: VocabularyFields) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens, by id, without the unused ones at the end."""
    key = "tokenizer.ggml.tokens"
    tokens = fields.get_list(key, str)
    if not tokens or len(tokens) > MAX_TOKENS:
        raise fields.error(key, f"must hold 1 to {MAX_TOKENS} tokens, got {len(tokens or ())}")
    types = fields.get_list("tokenizer.ggml.token_type", int) or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type", f"must have one type per token ({len(tokens)}), got {len(types)}")
    while types and types[-1] == UNUSED:
        types.pop()
    tokens = tokens[: len(types)]
    if len(set(tokens)) != len(tokens) or "" in tokens:
        raise fields.error(key, f"must be different and not empty, got {len(set(tokens) - {''})} such of {len(tokens)}")
    return tokens, types


def _bpe(fields: VocabularyFields, tokens: Sequence[str], kind: PreTokenizer) -> models.BPE:
    key = "tokenizer.ggml.merges"
    texts = fields.get_list(key, str)
    if texts is None:
        raise fields.error(key, "is missing: byte-level BPE needs its merges")
    merges: list[tuple[str, str]] = []
    for k, text in enumerate(texts):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise fields.error(key, f"must be two pieces with a space between them, got {text!r:.80} at {k}")
        merges.append((left, right))
    try:
        return models.BPE({token: k for k, token in enumerate(tokens)}, merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception for a merge of pieces outside the vocabulary
        raise fields.error(key, f"do not fit the vocabulary: {error}") from error


def _add_bos_eos(
    fields: VocabularyFields, backend: tokenizers.Tokenizer, kind: PreTokenizer, tokens: Sequence[str], ids: dict[str, int]
) -> None:
    """Put BOS before and EOS after an encoded text, where the file or else the kind says so."""
    wanted: dict[str, str] = {}
    for name, default in (("bos", kind.adds_bos), ("eos", False)):
        key = f"tokenizer.ggml.add_{name}_token"
        flag = fields.get(key, bool)
        token_id = ids.get(name)
        if flag and token_id is None:
            raise fields.error(key, f"is true, but tokenizer.ggml.{name}_token_id is missing")
        if (default if flag is None else flag) and token_id is not None:
            wanted[name] = tokens[token_id]
    if wanted:
        pattern = [text for text in (wanted.get("bos"), "$A", wanted.get("eos")) if text is not None]
        specials = [(text, backend.token_to_id(text)) for text in set(wanted.values())]
        backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=specials)
