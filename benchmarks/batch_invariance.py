"""What `--batch-invariant on` costs: both settings in one process, in turn, medians; a table, then one JSON line.

`python benchmarks/batch_invariance.py [--quantization none|int8]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from jaxinfer import LLM, SamplingParams
from jaxinfer.benchmarking.environment import describe_environment

SEQUENCES = (1, 2, 8, 32)
NEW_TOKENS = 48
PROMPT_TOKENS = 64


def tokens_per_second(llm: LLM, count: int) -> float:
    """Greedy tokens of `count` sequences over the time from the call to the last of them."""
    prompts = [list(range(100 + index, 100 + index + PROMPT_TOKENS)) for index in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, show_progress=False)
    return count * NEW_TOKENS / (time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llms = {
        setting: LLM(
            model="smollm2-135m",
            quantization=args.quantization,
            batch_invariant=setting,
            max_model_len=512,
            num_kv_blocks=512,
            prefix_caching="off",
        )
        for setting in ("on", "off")
    }
    speeds: dict[str, dict[int, list[float]]] = {setting: {count: [] for count in SEQUENCES} for setting in llms}
    for round_index in range(args.rounds + 1):
        for count in SEQUENCES:
            for setting in sorted(llms, reverse=bool(round_index % 2)):
                speed = tokens_per_second(llms[setting], count)
                if round_index:  # the first round warms up
                    speeds[setting][count].append(speed)
    medians = {setting: {count: statistics.median(values) for count, values in by_count.items()} for setting, by_count in speeds.items()}
    ratios = {count: medians["on"][count] / medians["off"][count] for count in SEQUENCES}
    for count in SEQUENCES:
        print(
            f"{count:3d} sequences   on {medians['on'][count]:7.1f}   off {medians['off'][count]:7.1f} tokens/s   ratio {ratios[count]:.3f}"
        )
    result = {"benchmark": "batch_invariance", **describe_environment(), "quantization": args.quantization}
    print(json.dumps(result | {"tokens_per_second": medians, "ratio_on_to_off": ratios}))


if __name__ == "__main__":
    main()
