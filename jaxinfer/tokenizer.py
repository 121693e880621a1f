"""Text to token ids and back, over a `tokenizers.Tokenizer`. No torch, no jax, no code from the model's folder.

Decoding is defined on bytes: every token stands for a fixed byte string, a sequence of tokens is their concatenation
read as UTF-8 (each maximal invalid part becomes U+FFFD). This is what byte-level BPE does; for SentencePiece vocabularies
with byte fallback it differs from `tokenizers` only in runs of byte tokens that are not valid UTF-8, where `tokenizers`
throws away the whole run. Being free of context, it can be streamed exactly (`jaxinfer.detokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.chat_template import ChatTemplate
from jaxinfer.errors import CheckpointError, RequestError, UnsupportedModelError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_HOLES = 1_000_000
"""Ids below the largest that belong to no token."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE, mapped to the byte (GPT-2's encoder.py).

    Printable Latin-1 stands for itself; the other bytes get the characters from U+0100 on, in order.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + k): byte for k, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """How a vocabulary's pieces spell bytes, read from the decoder of `tokenizer.json`.

    `space_mark` is the character that stands for a space (SentencePiece's U+2581), None for byte-level BPE.
    With a mark, pieces like `<0x0A>` are single bytes. `num_leading_spaces` spaces are taken off the front of the whole
    text (SentencePiece's dummy prefix).
    """

    space_mark: str | None = None
    num_leading_spaces: int = 0

    @classmethod
    def from_decoder(cls, decoder: Any) -> DecodingRules:
        """Read the rules of a `tokenizers` decoder.

        Raises:
            UnsupportedModelError: for one whose text cannot be said token by token (WordPiece, CTC, ...).
        """
        state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls()
        by_kind = {step["type"]: step for step in steps}
        is_sentencepiece = kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
        if is_sentencepiece and by_kind["Replace"]["content"] == " " and "String" in by_kind["Replace"]["pattern"]:
            strip = by_kind.get("Strip", {"content": " ", "start": 0, "stop": 0})
            if strip["content"] == " " and strip["stop"] == 0:
                mark = by_kind["Replace"]["pattern"]["String"]
                return cls(space_mark=mark, num_leading_spaces=strip["start"])
        raise UnsupportedModelError(
            f"tokenizer decoder {' + '.join(kinds)} is not supported; supported: ByteLevel, "
            "Replace + ByteFallback + Fuse [+ Strip of leading spaces]"
        )

    def bytes_of(self, piece: str, alphabet: Mapping[str, int]) -> bytes:
        """The bytes that one piece of the vocabulary stands for."""
        if self.space_mark is None:
            # An added token may hold characters outside the alphabet; then it stands for itself.
            spelled = [alphabet.get(character, -1) for character in piece]
            return piece.encode() if -1 in spelled else bytes(spelled)
        match = BYTE_TOKEN.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else piece.replace(self.space_mark, " ").encode()


class Tokenizer:
    """A vocabulary with its special tokens and chat template; immutable, so any thread may use it.

    `vocab_size` is one more than the largest id, ids from there on are padding rows of the model.
    `eos_token_ids` all end a sequence, the first is the tokenizer's own. `backend` is the `tokenizers.Tokenizer`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ):
        """`special_tokens` maps names (`bos_token`, `eos_token`, ...) to their text; all must be in the vocabulary.

        Raises:
            UnsupportedModelError: when the vocabulary's way of decoding is not implemented.
            CheckpointError: when a special token is not in the vocabulary, or an id lies outside of it.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self._rules = DecodingRules.from_decoder(backend.decoder)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        if self.vocab_size - len(vocabulary) > MAX_HOLES:
            raise CheckpointError(
                f"{len(vocabulary)} tokens have ids up to {self.vocab_size - 1}; at most {MAX_HOLES} ids may be without a token",
                file=TOKENIZER_FILE,
                field="vocab",
            )
        self._special_ids = frozenset(k for k, token in backend.get_added_tokens_decoder().items() if token.special)
        ids: dict[str, int] = {}
        for name, text in self.special_tokens.items():
            token_id = backend.token_to_id(text)
            if token_id is None:
                raise CheckpointError(f"{text!r} is not in the vocabulary", file=CONFIG_FILE, field=name)
            ids[name] = token_id
        for token_id in eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise CheckpointError(
                    f"{token_id} is not an id of the vocabulary (0 to {self.vocab_size - 1})", file=GENERATION_FILE, field="eos_token_id"
                )
        own = [ids["eos_token"]] if "eos_token" in ids else []
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_token_ids]))
        self.bos_token_id: int | None = ids.get("bos_token")

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load from a Hugging Face folder.

        `tokenizer.json` is needed; `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and
        `config.json` are read when there.

        Raises:
            CheckpointError: naming file and field of what is missing or damaged.
            UnsupportedModelError: when the vocabulary's way of decoding is not implemented.
        """
        folder = Path(folder)
        config = _read_json(folder / CONFIG_FILE)
        special = {name: text for name in NAMED_SPECIAL_TOKENS if (text := _token_text(folder, config, name)) is not None}
        template_file = folder / TEMPLATE_FILE
        template = _read_text(template_file) if template_file.is_file() else _default_template(folder, config)
        return cls(_read_backend(folder / TOKENIZER_FILE), special_tokens=special, eos_token_ids=_eos_ids(folder), chat_template=template)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and, unless there is one, `generation_config.json`.

        `from_folder` and transformers' AutoTokenizer give the same ids from it.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / TOKENIZER_FILE))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.eos_token_ids and not (folder / GENERATION_FILE).exists():
            ids = self.eos_token_ids
            generation = {"bos_token_id": self.bos_token_id, "eos_token_id": ids[0] if len(ids) == 1 else list(ids)}
            (folder / GENERATION_FILE).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        Raises:
            RequestError: naming `param`, for a text with lone surrogates, which has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise RequestError(f"{param} must be a string, got {type(text).__name__}", param=param)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} must be valid Unicode, got a lone surrogate at character {error.start}", param=param) from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a sequence of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        parts = [self.piece_bytes(token_id, skip_special_tokens=skip_special_tokens) for token_id in ids]
        return self.strip_front(b"".join(parts).decode("utf-8", "replace"))

    def piece_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """What a token adds to the bytes of a text, wherever it stands.

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id must be from 0 to {self.vocab_size - 1}, got {token_id}", param="token_ids")
        return b"" if skip_special_tokens and token_id in self._special_ids else self._bytes[token_id]

    @property
    def num_leading_spaces(self) -> int:
        """Spaces that are taken off the front of a decoded text (SentencePiece's dummy prefix)."""
        return self._rules.num_leading_spaces

    def strip_front(self, text: str) -> str:
        """Take the dummy prefix off the front of a whole decoded text."""
        front = text[: self.num_leading_spaces]
        return text[len(front) - len(front.lstrip(" ")) :]

    @cached_property
    def _bytes(self) -> list[bytes]:
        alphabet = byte_alphabet()
        pieces = map(self.backend.id_to_token, range(self.vocab_size))
        # A hole in the numbering has no piece; a model may still choose it, and it says nothing.
        return [b"" if piece is None else self._rules.bytes_of(piece, alphabet) for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a single token, special or not.

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        return self.piece_bytes(token_id, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """The text of a single token; U+FFFD where its bytes are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, template: str | None = None
    ) -> str:
        """The prompt text of a conversation, by the model's template or by the one given.

        Raises:
            RequestError: for messages that are wrong or that the template refuses, and when there is no template.
        """
        chosen = self._template if template is None else ChatTemplate(template)
        if chosen is None:
            raise RequestError("the model has no chat template: use completions with a prompt, or give a template", param="messages")
        return chosen.render(messages, add_generation_prompt=add_generation_prompt, **self.special_tokens)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, template: str | None = None
    ) -> list[int]:
        """Token ids of a conversation, with BOS exactly once where the tokenizer puts one.

        Raises:
            RequestError: as `apply_chat_template`.
        """
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, template=template)
        ids = self.encode(text, add_special_tokens=False, param="messages")
        # Only BOS is added: an EOS behind the generation prompt would end the answer before it begins.
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        wants_bos = bool(bos) and self.encode("")[:1] == bos
        return bos + ids if wants_bos and ids[:1] != bos else ids


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", file=str(path)) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise CheckpointError(f"is not JSON: {error}", file=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"must hold a JSON object, got {type(value).__name__}", file=str(path))
    return value


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            "not found; other vocabulary files (tokenizer.model, vocab.json) are not read: save the model with a fast tokenizer",
            file=str(path),
        )
    text = _read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for everything that is wrong with the file
        raise CheckpointError(f"is not a tokenizer: {error}", file=str(path)) from error


def _token_text(folder: Path, config: Mapping[str, Any], name: str) -> str | None:
    """A special token of tokenizer_config.json: its text, or an object with its text in `content`."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"must be a string, got {value!r:.80}", file=str(folder / CONFIG_FILE), field=name)
    return text


def _default_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of tokenizer_config.json: one string, or a list of named ones of which `default` counts."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"must be a string, got {value!r:.80}", file=str(folder / CONFIG_FILE), field="chat_template")
    return value


def _eos_ids(folder: Path) -> list[int]:
    """Ids that end a sequence: of generation_config.json, else of config.json."""
    for name in (GENERATION_FILE, "config.json"):
        config = _read_json(folder / name)
        value = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
                raise CheckpointError(f"must be an id or a list of ids, got {value!r:.80}", file=str(folder / name), field="eos_token_id")
            return ids
    return []
