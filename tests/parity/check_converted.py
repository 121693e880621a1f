"""Whether transformers makes of a converted folder what it makes of the GGUF: `python tests/parity/check_converted.py FOLDER [NAME]`.

Needs the environment of requirements-goldens.txt (torch), nothing of jaxinfer. FOLDER is what `jaxinfer convert … --format hf`
wrote, NAME the goldens to compare with (greedy, which is SmolLM2's; gemma3-270m; qwen2.5-coder-0.5b). Sixteen prompts: the same ids,
and the same 32 greedy tokens in float32. Ends with exit code 1 where one differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from golden_files import NUM_REAL_TOKENS, read_real_goldens
from make_goldens import step_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_PROMPTS = 16


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", nargs="?", default="greedy")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="eager").eval()
    goldens = read_real_goldens(args.name)
    goldens = goldens[:: len(goldens) // NUM_PROMPTS][:NUM_PROMPTS]
    num_same_ids = num_same_tokens = 0
    for golden in goldens:
        token_ids = tokenizer(golden.text).input_ids
        num_same_ids += token_ids == golden.prompt_token_ids
        tokens = np.argmax(step_logits(model, token_ids, NUM_REAL_TOKENS), axis=1).tolist()
        num_same_tokens += tokens == golden.token_ids[:NUM_REAL_TOKENS]
    print(
        f"{args.folder.name}: {type(model).__name__}, prompts with the same ids {num_same_ids} of {len(goldens)}, "
        f"with the same {NUM_REAL_TOKENS} greedy tokens {num_same_tokens}"
    )
    return int(num_same_ids < len(goldens) or num_same_tokens < len(goldens))


if __name__ == "__main__":
    raise SystemExit(main())
