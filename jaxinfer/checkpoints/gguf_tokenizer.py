"""A GGUF file's vocabulary as a Tokenizer (keys `tokenizer.ggml.*`; llama.cpp's docs/gguf.md and llama-vocab.cpp).

`tokenizer.ggml.model` is `gpt2` (byte-level BPE) or `llama` (SentencePiece, gguf_sentencepiece.py). How byte-level BPE cuts text
before merging is not in the file, only the name of a kind (`tokenizer.ggml.pre`): `PRE_TOKENIZERS` has the patterns of each, as in
the models' own tokenizer.json.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from gguf.constants import TokenType
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxinfer.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from jaxinfer.checkpoints.gguf_sentencepiece import sentencepiece
from jaxinfer.checkpoints.gguf_vocabulary import MERGES_KEY, VocabularyFields
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

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
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{fields.file}: tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    tokens, types = fields.tokens()
    if model == "gpt2":
        kind = _pre_tokenizer(fields)
        backend, adds_bos = _byte_level(fields, tokens, kind), kind.adds_bos
    else:
        backend, adds_bos = sentencepiece(fields, tokens, types), True
    for token_type, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        texts = [token for token, its_type in zip(tokens, types, strict=True) if its_type == token_type]
        known = [text for text in texts if backend.token_to_id(text) is not None]
        backend.add_tokens([tokenizers.AddedToken(text, normalized=False, special=is_special) for text in known])
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        token_id = fields.token_id(name, len(tokens))
        if token_id is not None:
            ids[name] = token_id
    _add_bos_eos(fields, backend, adds_bos, tokens, ids)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        special_tokens={name: tokens[ids[key]] for key, name in names.items() if key in ids},
        eos_token_ids=[ids[key] for key in ("eos", "eot", "eom") if key in ids],
        chat_template=fields.get("tokenizer.chat_template", str),
    )


def _byte_level(fields: VocabularyFields, tokens: Sequence[str], kind: PreTokenizer) -> tokenizers.Tokenizer:
    merges = fields.merges()
    if merges is None:
        raise fields.error(MERGES_KEY, "is missing: byte-level BPE needs its merges")
    try:
        model = models.BPE({token: k for k, token in enumerate(tokens)}, merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # tokenizers raises bare Exception for a merge of pieces outside the vocabulary
        raise fields.error(MERGES_KEY, f"do not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in kind.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


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


def _add_bos_eos(
    fields: VocabularyFields, backend: tokenizers.Tokenizer, adds_bos: bool, tokens: Sequence[str], ids: dict[str, int]
) -> None:
    """Put BOS before and EOS after an encoded text, where the file says so; `adds_bos` is for a file that does not."""
    wanted: dict[str, str] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
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
