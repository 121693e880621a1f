"""The tables of docs/quantization.md, made from benchmarks/results: `python -m tests.docs.quality_tables` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quantization.md"
START = "<!-- From here on made by `python -m tests.docs.quality_tables`. -->\n"
RESULTS = ROOT / "benchmarks" / "results"


def newest(pattern: str) -> dict[str, dict[str, Any]]:
    """The newest result of each name, by what stands behind `-<kind>-` in the file's name."""
    kind = f"-{pattern}"
    found = {path.stem.partition(kind)[2].lstrip("-"): path for path in sorted(RESULTS.glob(f"*{kind}*.json"))}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items()}


def quality_table(result: dict[str, Any]) -> str:
    lines = [
        "| Stored as | Perplexity | against float32 | KL, nat | same top token | on disk, MB | in memory, MB | load, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        disk = f"{row['bytes_on_disk'] / 1e6:.1f}" if row["bytes_on_disk"] else ""
        is_kv = name.startswith("KV")
        lines.append(
            f"| {name} | {row['perplexity']:.3f} | {100 * row['perplexity_ratio'] - 100:+.2f} % | {row['kl_mean']:.5f} "
            f"| {100 * row['top1']:.1f} % | {disk} | {'' if is_kv else format(row['bytes_in_memory'] / 1e6, '.1f')} "
            f"| {'' if is_kv else format(row['load_seconds'], '.1f')} |"
        )
    return "\n".join(lines)


def error_table(result: dict[str, Any]) -> str:
    lines = ["| Format | SNR, dB | rounding to nearest in numpy, dB |", "|---|---|---|"]
    lines += [f"| {name} | {row['snr_db']:.2f} | {row['numpy_nearest_snr_db']:.2f} |" for name, row in result["rows"].items()]
    return "\n".join(lines)


def render() -> str:
    """Both kinds of table."""
    parts = []
    for model, result in newest("quality").items():
        parts.append(
            f"### {model}\n\n{result['num_tokens']} tokens of the Brown corpus in windows of {result['window']}, {result['date'][:10]}, "
            f"{result['machine']['processor']}, jax {result['versions']['jax']}.\n\n{quality_table(result)}"
        )
    for result in newest("weight-error").values():
        parts.append(f"### Weight error on real floats: all-MiniLM-L6-v2\n\n{error_table(result)}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    head, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    assert start, f"{PAGE} has no line {START!r}"
    PAGE.write_text(f"{head}{START}\n{render()}", encoding="utf-8")
