"""OpenVINO GenAI reading the same GGUF: ContinuousBatchingPipeline on the CPU plugin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import Load, run_worker

DEFAULTS_TO_REPORT = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
"""The plugin's own choices, left as they are: what it computes with."""


class OpenVino:
    def __init__(self, load: Load):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = load.max_sequences
        scheduler.max_num_batched_tokens = max(2048, load.max_sequences * max(map(len, load.prompts)))
        # The same prompts come every round: nothing may be answered from an earlier one.
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 2
        properties = {"INFERENCE_NUM_THREADS": load.threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(Path(load.model), scheduler, "CPU", properties)
        self.versions = {"openvino": openvino.get_version(), "openvino-genai": openvino_genai.get_version()}
        core = openvino.Core()
        defaults = {name: str(core.get_property("CPU", name)).removeprefix("<Type: '").removesuffix("'>") for name in DEFAULTS_TO_REPORT}
        self.settings = {"weights": "read from the GGUF", "pipeline": "ContinuousBatchingPipeline", **properties, **defaults}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [len(result.m_generation_ids[0]) for result in self._pipeline.generate(tensors, [config] * len(prompts))]


if __name__ == "__main__":
    run_worker(OpenVino)
