"""Make the greedy goldens of the optional models: `python tests/parity/make_real_goldens.py gemma3-270m FILE.gguf`.

Needs the environment of requirements-goldens.txt, as make_goldens.py does, whose way of running a prompt it shares. Every fourth
prompt, as it stands (Gemma's file is a base model without a chat template), 32 tokens each.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

import numpy as np
import torch
from golden_files import NO_LOGITS, NUM_REAL_TOKENS, Golden, write_real_goldens
from make_goldens import step_logits
from prompts import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer


def golden_of(model, kind: str, text: str, prompt_token_ids: list[int]) -> Golden:
    """Run one prompt."""
    logits = step_logits(model, prompt_token_ids, NUM_REAL_TOKENS)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    steps = np.arange(NUM_REAL_TOKENS)
    gaps = logits[steps, best[:, 0]].astype(np.float64) - logits[steps, best[:, 1]]
    return Golden(
        kind=kind,
        text=text,
        prompt_token_ids=prompt_token_ids,
        token_ids=best[:, 0].tolist(),
        runner_up_ids=best[:, 1].tolist(),
        gaps=[round(float(gap), 6) for gap in gaps],
        columns=NO_LOGITS,
        logits=NO_LOGITS,
    )


def main() -> None:
    """Parse the command line, run every fourth prompt, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the preset")
    parser.add_argument("gguf", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    source = {"pretrained_model_name_or_path": str(options.gguf.parent), "gguf_file": options.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
    goldens = []
    for prompt in PROMPTS[::4]:
        goldens.append(golden_of(model, prompt.kind, prompt.text, tokenizer(prompt.text).input_ids))
        print(f"{len(goldens)}: {tokenizer.decode(goldens[-1].token_ids)!r}", file=sys.stderr)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf", "numpy", "tokenizers")}
    sha256 = hashlib.sha256(options.gguf.read_bytes()).hexdigest()
    write_real_goldens(
        options.name, goldens, {"gguf": options.gguf.name, "sha256": sha256, "python": platform.python_version(), **versions}
    )


if __name__ == "__main__":
    main()
