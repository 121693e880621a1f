"""The tables of docs/kv_memory.md, made from the newest result of benchmarks/kv.py: `python -m tests.docs.kv_table` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kv_memory.md"
START = "<!-- From here on made by `python -m tests.docs.kv_table`. -->\n"
RESULTS = ROOT / "benchmarks" / "results"
TIERS = {"cold": "computed", "device": "device", "host": "host memory", "disk": "disk, after a restart"}


def newest() -> dict[str, Any]:
    """The newest result."""
    return json.loads(max(RESULTS.glob("*-kv.json")).read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def shared_prefix(measured: dict[str, Any], floor: dict[str, Any]) -> str:
    on, off = measured["on"], measured["off"]
    rows = [
        ("prefill, s", f"{off['prefill_seconds']:.1f}", f"{on['prefill_seconds']:.1f}", f"{measured['prefill_ratio']:.1f} times less"),
        (
            "its floor, s",
            f"{floor['prefill_seconds_off']:.1f}",
            f"{floor['prefill_seconds_on']:.1f}",
            f"{floor['prefill_ratio']:.1f} times less",
        ),
        (
            "output tokens/s",
            f"{off['output_tokens_per_second']:.1f}",
            f"{on['output_tokens_per_second']:.1f}",
            f"{measured['throughput_ratio']:.1f} times more",
        ),
    ]
    said = f"{measured['requests']} requests behind one prefix of {measured['prefix_tokens']} tokens, {measured['answer_tokens']} new tokens each:"
    return f"{said}\n\n{table(('', 'cache off', 'cache on', ''), rows)}"


def chat(measured: dict[str, Any], floor: dict[str, Any]) -> str:
    off = [
        f"{milliseconds(seconds)} at turn {turn}" for turn, seconds in zip(measured["off_turns"], measured["off_ttft_seconds"], strict=True)
    ]
    return (
        f"A chat of {len(measured['ttft_seconds'])} turns, {measured['prompt_tokens'][-1]} tokens in the end: the first token comes after "
        f"{milliseconds(measured['early_seconds'])} in turns 2 to 6 and {milliseconds(measured['late_seconds'])} in the last five, "
        f"{measured['growth']:.2f} times as much (floor: {floor['growth_on']:.2f}, as a token attends to all before it). "
        f"Without a cache: {', '.join(off)}."
    )


def preemption(measured: dict[str, Any], floor: dict[str, Any]) -> str:
    swap, again, whole = measured["resume_seconds"]["swap"], measured["resume_seconds"]["recompute"], measured["round_trip_seconds"]
    floors = floor["swap_in_seconds"], floor["recompute_seconds"]
    rows = [
        (
            str(length),
            milliseconds(swap[key]),
            milliseconds(whole[key]),
            milliseconds(again[key]),
            milliseconds(floors[0][key]),
            milliseconds(floors[1][key]),
        )
        for length, key in ((length, str(length)) for length in measured["lengths"])
    ]
    head = ("tokens", "back from host memory", "out and back", "computed again", "floor of back", "floor of computed")
    stated = measured["stated_break_even_tokens"]["swap"]
    speeds = measured["overload_tokens_per_second"]
    return (
        "From the admission of a preempted request to its next token:\n\n"
        f"{table(head, rows)}\n\n"
        f"Stated at start: swap from {'never' if stated is None else stated} tokens on; observed, of these lengths: "
        f"{measured['observed_break_even_tokens'] or 'never'}. {measured['overload']['swap'][0]['sequences']} requests in a pool for ten give "
        f"{speeds['swap']:.0f} tokens/s with swap and {speeds['recompute']:.0f} with recomputation."
    )


def waste(measured: dict[str, Any], floor: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{measured[name]['kv_waste_percent']:.1f} %",
            f"{floor[f'{name}_waste_percent']:.1f} %",
            f"{measured[name]['mean_running']:.0f}",
        )
        for name in ("static", "paged")
    ]
    said = (
        f"Room without a token in what sequences hold, {measured['requests']} requests as long as ShareGPT's in the simulator "
        f"(static: {measured['max_model_len']} tokens set aside for each):"
    )
    return f"{said}\n\n{table(('allocation', 'waste', 'by arithmetic', 'running at once'), rows)}"


def tiers(measured: dict[str, Any], floor: dict[str, Any]) -> str:
    rows = [
        (said, milliseconds(measured["ttft_seconds"][name]), milliseconds(floor[name]), f"{measured['times_faster_than_cold'][name]:.1f}")
        for name, said in TIERS.items()
    ]
    said = f"The first token of a prompt of {measured['prompt_tokens']} tokens:"
    return f"{said}\n\n{table(('from', 'measured', 'floor', 'times faster'), rows)}"


PARTS = {"shared-prefix": shared_prefix, "chat": chat, "preemption": preemption, "waste": waste, "tiers": tiers}


def render() -> str:
    """All parts that the result has."""
    result = newest()
    machine = result["machine"]
    head = (
        f"SmolLM2-135M, {result['quantization']}, {machine['num_usable_processors']} cores of {machine['processor']}, jax "
        f"{result['versions']['jax']}, {result['date'][:10]} (`python benchmarks/kv.py`). Floors were computed beforehand, from the rates of the "
        f"machine: a memory copy of {result['rates']['copy_bytes_per_second'] / 1e9:.1f} GB/s, a disk that reads "
        f"{result['rates']['disk_read_bytes_per_second'] / 1e9:.2f} GB/s, matrix products of {result['rates']['flops_per_second'] / 1e9:.0f} GFLOP/s."
    )
    parts = [PARTS[name](measured, result["floors"][name]) for name, measured in result["measured"].items()]
    return "\n\n".join([head, *parts]) + "\n"


if __name__ == "__main__":
    head, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    assert start, f"{PAGE} has no line {START!r}"
    PAGE.write_text(f"{head}{START}\n{render()}", encoding="utf-8")
