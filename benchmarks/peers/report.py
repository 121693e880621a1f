"""From measured runs to the table and the JSON line."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

OURS = "jaxinfer"

Runs = Mapping[str, Mapping[int, Sequence[float]]]
"""engine -> number of sequences -> tokens per second of each round."""


def medians(runs: Runs) -> dict[str, dict[str, float]]:
    """Median tokens per second, keyed by engine and by number of sequences as JSON wants it, a string."""
    return {name: {str(n): round(statistics.median(values), 1) for n, values in by_n.items()} for name, by_n in runs.items()}


def _best(speeds: Mapping[str, Mapping[str, float]], names: Sequence[str], n: str) -> float:
    return max(speeds[name][n] for name in names)


def ratios(speeds: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """How jaxinfer stands: its faster setting against the fastest peer and against each, and each setting by itself."""
    ours = [name for name in speeds if name.startswith(OURS)]
    peers = [name for name in speeds if name not in ours]
    if not ours or not peers:
        return {}
    numbers = list(speeds[ours[0]])
    return {
        "best_of_ours": {n: max(ours, key=lambda name, n=n: speeds[name][n]) for n in numbers},
        "ratio_to_best_peer": {n: round(_best(speeds, ours, n) / _best(speeds, peers, n), 3) for n in numbers},
        "ratio_to": {peer: {n: round(_best(speeds, ours, n) / speeds[peer][n], 3) for n in numbers} for peer in peers},
        "ratio_of": {own: {peer: {n: round(speeds[own][n] / speeds[peer][n], 3) for n in numbers} for peer in peers} for own in ours},
    }


def machine() -> dict[str, Any]:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in found.items()}
    flags = set(fields.get("flags", "").split())
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpus": sum(line.startswith("processor") for line in lines),
        "isa": sorted(flags & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8"}),
        "memory_gib": round(total_kib / 2**20, 1),
        "system": platform.platform(),
    }


def table(runs: Runs, new_tokens: int) -> Table:
    """Median, slowest and fastest round of each engine."""
    numbers = list(next(iter(runs.values())))
    shown = Table(title=f"tokens/s over all sequences, prefill and {new_tokens} new tokens each: median (slowest–fastest round)")
    shown.add_column("engine")
    for n in numbers:
        shown.add_column(f"{n} sequence{'s' if n > 1 else ''}", justify="right")
    for name, by_n in runs.items():
        cells = (f"{statistics.median(by_n[n]):.0f} ({min(by_n[n]):.0f}–{max(by_n[n]):.0f})" for n in numbers)
        shown.add_row(name, *cells)
    return shown
