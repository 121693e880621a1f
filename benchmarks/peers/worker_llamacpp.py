"""llama.cpp, by the `xllamacpp` wheel: its own server inside this process, so continuous batching and all its slots."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import xllamacpp
from protocol import Load, run_worker


class LlamaCpp:
    def __init__(self, load: Load):
        params = xllamacpp.CommonParams()
        params.model.path = load.model
        params.n_parallel = load.max_sequences
        # A slot's share of the context is rounded up to whole 256-token pieces.
        slot = -(-(load.max_length + 1) // 256) * 256
        params.n_ctx = slot * load.max_sequences
        params.n_batch, params.n_ubatch = 2048, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = load.threads
        # The same prompts come every round: nothing may be answered from an earlier one.
        params.cache_prompt, params.cache_ram_mib, params.cache_idle_slots = False, 0, False
        params.fit_params, params.verbosity = False, 0
        self._server = xllamacpp.Server(params)
        self.versions = {"xllamacpp": importlib.metadata.version("xllamacpp")}
        self.settings = {
            "weights": "the GGUF's own",
            "slots": load.max_sequences,
            "n_ubatch": 512,
            "cpu": xllamacpp.get_system_info().strip(),
        }

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
        request = {
            "prompt": [list(prompt) for prompt in prompts],
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._server.handle_completions(request)
        if "choices" not in answer:
            raise RuntimeError(str(answer))
        total = answer["usage"]["completion_tokens"]
        finished = {choice["finish_reason"] for choice in answer["choices"]}
        if len(answer["choices"]) != len(prompts) or finished != {"length"}:
            raise RuntimeError(f"{len(prompts)} prompts gave {len(answer['choices'])} answers that ended by {finished}")
        return [total // len(prompts)] * len(prompts)


if __name__ == "__main__":
    run_worker(LlamaCpp)
