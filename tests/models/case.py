"""What a golden model is: its configuration, how its random weights are drawn, and which features it must show.

One file per case in `cases/`, found by name; `make_goldens.py` runs them through transformers, `test_goldens.py` through the engine.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

CASES_DIR = Path(__file__).with_name("cases")
GOLDENS_DIR = Path(__file__).with_name("goldens")
NUM_GREEDY = 10
"""Tokens that are generated after each prompt."""
MIN_MOVE = 1e-2
"""What removing a feature must move some logit by."""

Replacement = Literal["zeros", "ones", "absent"]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A change that takes one feature out of the model.

    `config` replaces attributes of config.json (None: as if absent), `tensors` fills all tensors whose names match a
    regular expression, `fields` replaces fields of the model's Config, or with a mapping fields of
    what stands there, for what config.json has no attribute for.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Replacement] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny random model of one family.

    Attributes:
        name: its file in `cases/`, its folder in `goldens/`.
        config: config.json as such models are published; transformers' own form of it is what is saved.
        prompt_lens: one prompt of random tokens each; the last one runs past the window and the original context.
        max_model_len: what the engine is told.
        gains: regular expression of tensor names -> standard deviation of the output for inputs of variance one
            (for vectors: of the entries around their centre); the first match counts, then `DEFAULT_GAINS`.
        norm_centre: what random norm weights lie around.
        stacked: tensors stored [experts, in, out], by regular expression; all others are [..., out, in].
        rounded: what random tensors are rounded to, called with name and tensor.
        features: what the goldens must be sensitive to.
        is_token_by_token: the golden is computed one token at a time, with a cache.
        is_quick: runs with every change, not only with `-m goldens`.
    """

    name: str
    config: Mapping[str, Any]
    features: tuple[Feature, ...]
    prompt_lens: tuple[int, ...] = (5, 17, 38)
    max_model_len: int = 64
    gains: Mapping[str, float] = field(default_factory=dict)
    norm_centre: float = 1.0
    stacked: str | None = None
    rounded: Callable[[str, np.ndarray], np.ndarray] = lambda name, tensor: tensor
    is_token_by_token: bool = False
    is_quick: bool = False
    seed: int = 0

    @property
    def folder(self) -> Path:
        """Where its goldens are."""
        return GOLDENS_DIR / self.name

    def is_stacked(self, name: str) -> bool:
        """Whether a tensor is stored [experts, in, out]."""
        return self.stacked is not None and re.search(self.stacked, name) is not None

    def prompts(self) -> list[list[int]]:
        """Token ids, without repetition patterns that attention could hide behind."""
        draws = np.random.default_rng(self.seed + 1)
        return [draws.integers(0, self.config["vocab_size"], length).tolist() for length in self.prompt_lens]

    def weight(self, name: str, shape: tuple[int, ...], num_in: int) -> np.ndarray:
        """A random tensor, float16; each draws from a stream of its own name, so that others may come and go."""
        draws = np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(shape)
        gain = next(gain for pattern, gain in (*self.gains.items(), *DEFAULT_GAINS) if re.search(pattern, name))
        if len(shape) > 1:
            draws *= gain if re.search(EMBEDDINGS, name) else gain / np.sqrt(num_in)
        else:
            draws = draws * gain + (self.norm_centre if re.search(NORMS, name) else 0.0)
        return self.rounded(name, draws).astype(np.float16)


EMBEDDINGS = r"embed_tokens|wte|wpe"
NORMS = r"(norm|ln_\w+)\.weight$"
DEFAULT_GAINS: tuple[tuple[str, float], ...] = (
    (NORMS, 0.4),
    (r"(q_proj|k_proj)\.weight$", 2.0),
    (r"(qkv_proj|c_attn)\.weight$", 1.6),
    (r"bias$", 0.6),
    (r"sinks$", 1.5),
    (r"", 1.0),
)
"""Queries and keys are large: default initialisation attends evenly, and whatever shapes attention would go unseen."""


def load_case(name: str) -> Case:
    """The case in `cases/<name>.py`."""
    return importlib.import_module(f"tests.models.cases.{name}").CASE


def all_cases() -> list[Case]:
    """Every file in `cases/`, by name."""
    return [load_case(path.stem) for path in sorted(CASES_DIR.glob("*.py"))]


def changed_config(config: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with attributes replaced; those that become None are left out."""
    return {key: value for key, value in {**config, **change}.items() if value is not None or key not in change}


def changed_tensors(tensors: Mapping[str, np.ndarray], change: Mapping[str, Replacement]) -> dict[str, np.ndarray]:
    """`tensors` with what `change` puts in the place of some, or leaves out."""
    changed = dict(tensors)
    for pattern, replacement in change.items():
        names = [name for name in tensors if re.search(pattern, name)]
        assert names, f"no tensor matches {pattern}"
        for name in names:
            if replacement == "absent":
                del changed[name]
            else:
                changed[name] = np.full_like(tensors[name], 1.0 if replacement == "ones" else 0.0)
    return changed
