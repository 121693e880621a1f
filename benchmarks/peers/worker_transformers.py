"""transformers and torch in float32 on the same weights, dequantised: one static batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from protocol import Load, run_worker


class Transformers:
    def __init__(self, load: Load):
        torch.set_num_threads(load.threads)
        path = Path(load.model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.settings = {"weights": "float32", "attention": self._model.config._attn_implementation}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("a static batch wants prompts of one length")
        ids = torch.tensor([list(prompt) for prompt in prompts])
        # min_new_tokens masks end-of-sequence, the only way generate() has to go past it.
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        return [out.shape[1] - ids.shape[1]] * len(prompts)


if __name__ == "__main__":
    run_worker(Transformers)
