"""SentencePiece vocabularies in GGUF (`tokenizer.ggml.model` = `llama`): spaces are U+2581, bytes without a token are `<0xNN>`.

Such a file has scores and no merges: of all neighbours that together are a token, those with the best score are joined first. A
BPE model does the same when every way to cut a token in two is a merge, in the order of the tokens' scores. Facts from llama.cpp's
llama-vocab.cpp and transformers' integrations/gguf.

Llama's prefix space stands before the text and after every special token, also where the text begins with a space, as in llama.cpp
and in the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import tokenizers
from gguf.constants import TokenType
from tokenizers import decoders, models, normalizers

from jaxinfer.checkpoints.gguf_vocabulary import MERGES_KEY, VocabularyFields

SPACE = "\u2581"
SCORES_KEY = "tokenizer.ggml.scores"
GEMMA = ("gemma", "gemma2", "gemma3")
"""Their merges follow the order of the tokens, not the scores, and they have no prefix space."""
MERGED_TYPES = (TokenType.NORMAL, TokenType.USER_DEFINED)
"""What text can become; control and byte tokens are never the result of joining characters."""


def sentencepiece(fields: VocabularyFields, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """The model, normalizer and decoder; special tokens and BOS are the caller's. Tokens of spaces are in it as runs of U+2581.

    Raises:
        CheckpointError: naming file and field of metadata that is missing or damaged.
    """
    is_gemma = fields.architecture in GEMMA
    tokens = _respell_spaces(tokens)
    vocabulary = {token: k for k, token in enumerate(tokens)}
    merges = fields.merges()
    if merges is None:
        scores = [-k for k in range(len(tokens))] if is_gemma else _scores(fields, len(tokens))
        merges = merges_by_score(vocabulary, scores, [its_type in MERGED_TYPES for its_type in types])
    unknown = fields.token_id("unknown", len(tokens))
    try:
        model = models.BPE(vocabulary, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True)
    except Exception as error:  # tokenizers raises bare Exception for a merge of pieces outside the vocabulary
        raise fields.error(MERGES_KEY, f"do not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    flag = fields.get("tokenizer.ggml.add_space_prefix", bool)
    has_prefix = not is_gemma if flag is None else flag
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend


def _respell_spaces(tokens: Sequence[str]) -> list[str]:
    """Gemma's files have its runs of spaces as spaces; text that is looked up has U+2581 in their place."""
    known, respelled = set(tokens), list(tokens)
    for k, token in enumerate(tokens):
        if set(token) == {" "} and (spelled := SPACE * len(token)) not in known:
            respelled[k] = spelled
    return respelled


def _scores(fields: VocabularyFields, num_tokens: int) -> list[float]:
    scores = fields.get_list(SCORES_KEY, float)
    if scores is None:
        raise fields.error(SCORES_KEY, f"is missing, and so is {MERGES_KEY}: nothing says what is joined first")
    if len(scores) < num_tokens or not all(map(isfinite, scores)):
        raise fields.error(SCORES_KEY, f"must be a number for each of {num_tokens} tokens, got {len(scores)}")
    return scores


def merges_by_score(vocabulary: dict[str, int], scores: Sequence[float], is_merged: Sequence[bool]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens; best score first, then the longer left piece, the longer right piece, the lower id."""
    cuts = [
        (token, cut)
        for token, k in vocabulary.items()
        if is_merged[k]
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    cuts.sort(key=lambda item: (-scores[vocabulary[item[0]]], -item[1], item[1] - len(item[0])))
    return [(token[:cut], token[cut:]) for token, cut in cuts]
