"""What a step ahead brings: both settings in one process, in turn; a table, a timeline, then one JSON line.

`python benchmarks/async_scheduling.py [--models tiny smollm2-135m] [--picture docs/pictures/async_timeline.png] [--output FILE]`

`tiny` is a random Llama of 2 layers with SmolLM2's tokenizer, where the host's share is largest. All rows decode greedily all the
time. When programs begin and end on the device is read from a profile (xplane), whose own cost is not in the speeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from jaxinfer import LLM, SamplingParams
from jaxinfer.benchmarking.environment import describe_environment
from jaxinfer.engine import Engine
from jaxinfer.request import GenerationRequest, RequestId
from jaxinfer.step_trace import StepTrace
from serving.garbage_collector import settle_garbage_collector

ROWS = 32
MAX_MODEL_LEN = 512
NEW_TOKENS = 448
WARM_UP_STEPS = 6
SETTINGS = ("on", "off")
HOST_CALLS = (("scheduler", "schedule"), ("runner", "launch"), ("scheduler", "update"))
WAIT = "np.asarray(jax.Array)"


@dataclass(frozen=True)
class Span:
    """Something that took time, in milliseconds of the profile's clock."""

    name: str
    begin: float
    end: float


def load(model: str, folder: Path, setting: str) -> Engine:
    """One engine with room for all rows, so that nothing is preempted and nothing moves."""
    options: dict[str, Any] = {"quantization": "int8"}
    if model == "tiny":
        from jaxinfer.checkpoints.pull import find_preset, pull
        from tests.tiny_llama import write_tiny_llama

        preset = find_preset("smollm2-135m")
        assert preset is not None
        path = folder / "tiny"
        model, options = str(path if path.exists() else write_tiny_llama(path, tokenizer_from=pull(preset))), {}
    llm = LLM(
        model=model,
        async_scheduling=setting,
        max_num_seqs=ROWS,
        max_num_batched_tokens=128,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=ROWS * MAX_MODEL_LEN // 16,
        host_kv_bytes=0,
        prefix_caching="off",
        **options,
    )
    return llm.engine


@contextmanager
def steady(engine: Engine) -> Generator[Callable[[int], float]]:
    """All rows decoding; gives a function that takes so many steps and returns the tokens per second of them."""
    for index in range(ROWS):
        prompt = tuple(range(100 + index, 108 + index))
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        engine.add_request(GenerationRequest(request_id=RequestId(f"row-{index}"), prompt_token_ids=prompt, params=params))

    def take(num_steps: int) -> float:
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        return ROWS * num_steps / (time.perf_counter() - started)

    try:
        take(2 * ROWS * 8 // 128 + WARM_UP_STEPS)  # the prompts first
        yield take
    finally:
        for request_id in engine.running_ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()


def compare(engines: dict[str, Engine], num_pairs: int, num_steps: int) -> dict[str, list[float]]:
    """Tokens per second of both settings, in turn, each pair begun by another one. The first pair warms up."""
    speeds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for pair in range(num_pairs + 1):
        for setting in sorted(SETTINGS, reverse=bool(pair % 2)):
            with steady(engines[setting]) as take:
                speed = take(num_steps)
            if pair:
                speeds[setting].append(speed)
    return speeds


def share_ahead(engine: Engine, num_steps: int) -> float:
    """Of steady steps: how many were enqueued while the one before still ran."""
    with steady(engine) as take:
        engine.trace = StepTrace()
        take(num_steps)
        trace, engine.trace = engine.trace, None
    return trace.share_ahead


# ---- what the profile says -----------------------------------------------------------------------------------------


def annotated(owner: Any, name: str) -> Callable[[], None]:
    """Let the profile show the calls of a method, until the returned function is called."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return method(*arguments)

    setattr(owner, name, call)
    return lambda: delattr(owner, name)


def profile(engine: Engine, num_steps: int) -> tuple[list[Span], list[Span]]:
    """Host calls and device programs of steady steps, in order."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder, steady(engine) as take:
        undo = [annotated(getattr(engine, owner), name) for owner, name in HOST_CALLS]
        with jax.profiler.trace(folder, profiler_options=options):
            take(num_steps)
        for call in undo:
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return spans_of(jax.profiler.ProfileData.from_file(str(file)))


def spans_of(data: Any) -> tuple[list[Span], list[Span]]:
    """A CPU's profile has operations with the run they belong to; a GPU's has a line of whole programs."""
    names = {name for _, name in HOST_CALLS} | {WAIT}
    host: list[Span] = []
    modules: list[Span] = []
    runs: dict[int, Span] = {}
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                span = Span(event.name, event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6)
                if event.name in names:
                    host.append(span)
                elif line.name == "XLA Modules":
                    modules.append(span)
                elif plane.name.startswith("/host") and not event.name.startswith("end: "):
                    stats = dict(event.stats)
                    if "hlo_module" in stats:
                        run = runs.get(stats["run_id"], span)
                        runs[stats["run_id"]] = Span(stats["hlo_module"], min(run.begin, span.begin), max(run.end, span.end))
    return sorted(host, key=lambda span: span.begin), sorted(modules or runs.values(), key=lambda span: span.begin)


def gaps_of(programs: list[Span]) -> list[float]:
    """Milliseconds from the end of each step's last program to the begin of the next step's first one."""
    return [after.begin - before.end for before, after in pairwise(programs) if "forward" in after.name and "forward" not in before.name]


def draw(profiles: dict[str, tuple[list[Span], list[Span]]], path: Path, num_steps: int = 4) -> None:
    """Some steps of each setting, one above the other on the same scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"schedule": "#4477aa", "launch": "#66ccee", "update": "#228833", WAIT: "#dddddd", "forward": "#ee6677", "sample": "#ccbb44"}
    labels = {WAIT: "wait for the tokens"}
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 4), sharex=True, layout="constrained")
    longest = 0.0
    for axis, setting in zip(axes, ("off", "on"), strict=True):
        host, programs = profiles[setting]
        forwards = [span.begin for span in programs if "forward" in span.name]
        begin = forwards[len(forwards) // 2]
        end = forwards[len(forwards) // 2 + num_steps]
        for lane, spans in ((1, host), (0, programs)):
            for span in spans:
                name = span.name if span.name in colours else "forward" if "forward" in span.name else "sample"
                if span.end > begin and span.begin < end:
                    axis.barh(
                        lane, span.end - span.begin, left=span.begin - begin, height=0.7, color=colours[name], label=labels.get(name, name)
                    )
        axis.set_yticks([0, 1], ["device", "host"])
        longest = max(longest, end - begin)
        axis.set_title(f"--async-scheduling {setting}: {num_steps} steps in {end - begin:.1f} ms", loc="left")
    axes[1].set_xlim(0, longest)
    axes[1].set_xlabel("milliseconds")
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=110)


def measure(model: str, folder: Path, num_pairs: int, num_steps: int, picture: Path | None) -> dict[str, Any]:
    """Everything of one model."""
    engines = {setting: load(model, folder, setting) for setting in SETTINGS}
    speeds = compare(engines, num_pairs, num_steps)
    ratios = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
    share = share_ahead(engines["on"], 3 * num_steps)
    profiles = {setting: profile(engine, min(num_steps, 40)) for setting, engine in engines.items()}
    if picture is not None:
        draw(profiles, picture)
    result = {
        "tokens_per_second": {setting: statistics.median(values) for setting, values in speeds.items()},
        "all_pairs": speeds,
        "ratio_on_to_off": statistics.median(ratios),
        "share_enqueued_ahead": share,
        "gap_milliseconds_p50": {setting: statistics.median(gaps_of(programs)) for setting, (_, programs) in profiles.items()},
        "gap_source": "jax.profiler xplane: end of a step's sampler to the begin of the next step's forward program",
    }
    gaps = result["gap_milliseconds_p50"]
    print(
        f"{model:16s} on {result['tokens_per_second']['on']:8.1f}  off {result['tokens_per_second']['off']:8.1f} tokens/s   "
        f"ratio {result['ratio_on_to_off']:.3f}   enqueued ahead {share:.1%}   gap on {gaps['on']:.3f}, off {gaps['off']:.3f} ms"
    )
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100, help="steps of each half of a pair; half of them for other models than tiny")
    parser.add_argument("--picture", type=Path, help="where to draw the first model's timeline")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    settle_garbage_collector()  # as the server does
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, model in enumerate(args.models):
            num_steps = args.steps if model == "tiny" else max(10, args.steps // 2)
            results[model] = measure(model, Path(folder), args.pairs, num_steps, None if index else args.picture)
    line = json.dumps({"benchmark": "async_scheduling", **describe_environment(), "rows": ROWS, "models": results})
    if args.output is not None:
        args.output.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
