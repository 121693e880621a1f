"""Where the parity goldens lie and what stands in them; read by the tests, written by make_goldens.py."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

GOLDENS_DIR = Path(__file__).parent / "goldens"
NEW_TOKENS = 64
ROW_STEPS = (0, 16, 32, 48, 63)
"""Logits rows are stored for these steps; step i predicts continuation token i, so its input ends with token i - 1."""
NUM_SPACED_COLUMNS = 256
NUM_TOP_COLUMNS = 16
NUM_REAL_TOKENS = 32
"""New tokens per prompt in the goldens of the optional models, which hold no logits."""
NO_LOGITS = np.zeros((0, 0))


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt and what transformers does with it in float32.

    `text` is what was tokenized (a chat prompt: after the template). `runner_up_ids[i]` and `gaps[i]` are the second-best token
    at step i and how far behind it is, in nats. `columns [R, C]` are vocabulary ids and `logits [R, C]` their float32 logits at
    the R steps of ROW_STEPS: evenly spaced ids first, then the best ids.
    """

    kind: str
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    runner_up_ids: list[int]
    gaps: list[float]
    columns: np.ndarray
    logits: np.ndarray


def spaced_columns(vocab_size: int) -> np.ndarray:
    """NUM_SPACED_COLUMNS evenly spaced ids, first and last included."""
    return np.linspace(0, vocab_size - 1, NUM_SPACED_COLUMNS).round().astype(np.int32)


def write_goldens(goldens: list[Golden], about: dict[str, str]) -> None:
    """Write greedy.json.gz and logits.npz; `about` says what made them."""
    GOLDENS_DIR.mkdir(exist_ok=True)
    arrays = ("columns", "logits")
    _write_rows(GOLDENS_DIR / "greedy.json.gz", goldens, about)
    np.savez_compressed(GOLDENS_DIR / "logits.npz", **{name: np.stack([getattr(golden, name) for golden in goldens]) for name in arrays})


def read_goldens() -> list[Golden]:
    """Every golden, in the order of `prompts.PROMPTS`."""
    rows = json.loads(gzip.decompress((GOLDENS_DIR / "greedy.json.gz").read_bytes()))["goldens"]
    with np.load(GOLDENS_DIR / "logits.npz") as arrays:
        columns, logits = arrays["columns"], arrays["logits"]
    return [Golden(**row, columns=columns[index], logits=logits[index]) for index, row in enumerate(rows)]


def write_real_goldens(name: str, goldens: list[Golden], about: dict[str, str]) -> None:
    """Write the goldens of an optional model, tokens alone."""
    _write_rows(GOLDENS_DIR / f"{name}.json.gz", goldens, about)


def read_real_goldens(name: str) -> list[Golden]:
    """The goldens of an optional model."""
    rows = json.loads(gzip.decompress((GOLDENS_DIR / f"{name}.json.gz").read_bytes()))["goldens"]
    return [Golden(**row, columns=NO_LOGITS, logits=NO_LOGITS) for row in rows]


def _write_rows(path: Path, goldens: list[Golden], about: dict[str, str]) -> None:
    rows = [{name: value for name, value in asdict(golden).items() if name not in ("columns", "logits")} for golden in goldens]
    text = json.dumps({"about": about, "goldens": rows}, ensure_ascii=False)
    # mtime 0: the same goldens give the same file.
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
