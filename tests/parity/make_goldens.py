"""Make the parity goldens with transformers: `python tests/parity/make_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf`.

Needs the environment of requirements-goldens.txt (torch), nothing of jaxinfer. The weights are the GGUF's, dequantised to float32
by transformers; each prompt runs alone, prefill then one token at a time, always the most probable token, end-of-sequence ignored.
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
from golden_files import NEW_TOKENS, NUM_TOP_COLUMNS, ROW_STEPS, Golden, spaced_columns, write_goldens
from prompts import PROMPTS, ParityPrompt
from transformers import AutoModelForCausalLM, AutoTokenizer


def prompt_text(prompt: ParityPrompt, tokenizer) -> str:
    """The text to tokenize: a chat prompt becomes one user turn under the model's own template."""
    if prompt.kind != "chat":
        return prompt.text
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True)


def step_logits(model, prompt_token_ids: list[int], num_new_tokens: int = NEW_TOKENS) -> np.ndarray:
    """Logits `[num_new_tokens, V]` float32 of a greedy continuation."""
    rows, cache = [], None
    token_ids = torch.tensor([prompt_token_ids])
    for _ in range(num_new_tokens):
        out = model(input_ids=token_ids, past_key_values=cache, use_cache=True)
        cache, row = out.past_key_values, out.logits[0, -1]
        rows.append(row.numpy().copy())
        token_ids = row.argmax()[None, None]
    return np.stack(rows)


def golden_of(model, kind: str, text: str, prompt_token_ids: list[int]) -> Golden:
    """Run one prompt."""
    logits = step_logits(model, prompt_token_ids)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_TOP_COLUMNS].astype(np.int32)
    steps = np.arange(NEW_TOKENS)
    # The softmax's normaliser cancels, so a difference of logits is a difference of log-probabilities.
    gaps = logits[steps, best[:, 0]].astype(np.float64) - logits[steps, best[:, 1]]
    spaced = np.tile(spaced_columns(logits.shape[1]), (len(ROW_STEPS), 1))
    columns = np.concatenate([spaced, best[list(ROW_STEPS)]], axis=1)
    return Golden(
        kind=kind,
        text=text,
        prompt_token_ids=prompt_token_ids,
        token_ids=best[:, 0].tolist(),
        runner_up_ids=best[:, 1].tolist(),
        gaps=[round(float(gap), 6) for gap in gaps],
        columns=columns,
        logits=np.take_along_axis(logits[list(ROW_STEPS)], columns, axis=1),
    )


def main() -> None:
    """Parse the command line, run every prompt, write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    source = {"pretrained_model_name_or_path": str(options.gguf.parent), "gguf_file": options.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
    goldens = []
    for index, prompt in enumerate(PROMPTS):
        text = prompt_text(prompt, tokenizer)
        goldens.append(golden_of(model, prompt.kind, text, tokenizer(text).input_ids))
        print(f"{index + 1}/{len(PROMPTS)} {len(goldens[-1].prompt_token_ids)} tokens", file=sys.stderr)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf", "numpy", "tokenizers")}
    sha256 = hashlib.sha256(options.gguf.read_bytes()).hexdigest()
    write_goldens(goldens, {"gguf": options.gguf.name, "sha256": sha256, "python": platform.python_version(), **versions})


if __name__ == "__main__":
    main()
