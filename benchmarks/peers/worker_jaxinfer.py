"""jaxinfer by its Python API: `worker_jaxinfer.py int8`, `none` or `auto`, run by the project's own environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
from protocol import Load, run_worker

import jaxinfer


class JaxInfer:
    def __init__(self, load: Load):
        self._params = jaxinfer.SamplingParams(temperature=0.0, ignore_eos=True)
        options = {"quantization": sys.argv[1], "dtype": "float32", "max_num_seqs": load.max_sequences, "prefix_caching": "off"}
        self._llm = jaxinfer.LLM(model=load.model, max_model_len=load.max_length, show_progress=False, **options)
        self.versions = {"jaxinfer": jaxinfer.__version__, "jax": jax.__version__}
        self.settings = {"weights": {"none": "float32"}.get(sys.argv[1], sys.argv[1]), **options}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
        params = self._params.replace(max_tokens=new_tokens)
        outputs = self._llm.generate([list(prompt) for prompt in prompts], params, show_progress=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    run_worker(JaxInfer)
