"""Write tests/models/goldens/: tiny random models with what transformers computes of them, float32, eager attention.

Needs the packages of requirements-goldens.txt, which the tests do not. From the root of the repository:

    python -m tests.models.make_goldens [NAME ...]

Per case a Hugging Face folder (config.json, model.safetensors in float16, exactly) and `golden.safetensors`: for prompt i
`token_ids.i` (prompt and greedy continuation) and `logits.i` (of all of them but the last token).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.case import NUM_GREEDY, Case, all_cases, load_case

MIN_GAP = 0.02
"""Nats between the best and the second-best token at every greedy step: rounding must not decide."""
MIN_DISTINCT = 4
"""Different tokens of a greedy continuation; a model that repeats its input would hide most of itself."""
MAX_FOLDER_BYTES = 200_000
NUM_SEEDS = 40


class PoorGoldenError(Exception):
    """These random weights give a model whose golden says too little."""


def build(case: Case) -> Any:
    """The model in float32, with weights that float16 holds exactly."""
    config = AutoConfig.for_model(**case.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    conv1d = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    with torch.no_grad():
        stored = model.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
        for name, parameter in (*model.named_parameters(), *buffers):  # a tied tensor is listed once
            shape = tuple(parameter.shape)
            num_in = shape[0] if name in conv1d else shape[-2] if case.is_stacked(name) else shape[-1]
            parameter.copy_(torch.from_numpy(case.weight(name, shape, num_in).astype(np.float32)))
    return model


def published(model: Any) -> dict[str, np.ndarray]:
    """The tensors as transformers saves them, which is not always as it holds them: experts one by one. In float16, exactly."""
    with tempfile.TemporaryDirectory() as folder:
        model.half().save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


@torch.no_grad()
def stepwise(model: Any, token_ids: list[int], num_new: int) -> tuple[list[int], np.ndarray]:
    """Greedy continuation and logits, one token at a time from the first, with a cache."""
    token_ids, rows, cache = list(token_ids), [], None
    total = len(token_ids) + num_new
    for position in range(total - 1):
        out = model(torch.tensor([[token_ids[position]]]), cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1].numpy())
        if position + 1 == len(token_ids):
            token_ids.append(int(rows[-1].argmax()))
    return token_ids, np.stack(rows)


@torch.no_grad()
def whole(model: Any, prompt: list[int], num_new: int) -> tuple[list[int], np.ndarray]:
    """Greedy continuation by `generate`, then the logits of everything at once."""
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return generated[0].tolist(), model(generated[:, :-1]).logits[0].numpy()


def compute(case: Case) -> tuple[Any, dict[str, np.ndarray]]:
    """The model and the golden.

    Raises:
        PoorGoldenError: the golden would say too little.
    """
    model = build(case)
    golden: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(case.prompts()):
        token_ids, logits = (stepwise if case.is_token_by_token else whole)(model, prompt, NUM_GREEDY)
        greedy, best = token_ids[len(prompt) :], np.sort(logits[len(prompt) - 1 :], axis=1)
        gap = (best[:, -1] - best[:, -2]).min()
        if len(set(greedy)) < MIN_DISTINCT or gap < MIN_GAP or logits[len(prompt) - 1 :].argmax(axis=1).tolist() != greedy:
            raise PoorGoldenError(f"continuation {greedy}, smallest gap {gap:.4f}")
        golden |= {f"token_ids.{index}": np.array(token_ids, np.int32), f"logits.{index}": logits.astype(np.float32)}
    return model, golden


def write(case: Case) -> str:
    """Compute with the first seed that gives a golden worth keeping, and write the folder."""
    for seed in range(case.seed, case.seed + NUM_SEEDS):
        try:
            model, golden = compute(replace(case, seed=seed))
            break
        except PoorGoldenError as error:
            reason = error
    else:
        raise SystemExit(f"{case.name}: {reason}; choose other gains")
    case.folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(case.folder)
    save_file(published(model), case.folder / "model.safetensors", metadata={"format": "pt"})
    save_file(golden, case.folder / "golden.safetensors")
    num_bytes = sum(path.stat().st_size for path in case.folder.iterdir())
    if num_bytes > MAX_FOLDER_BYTES:
        raise SystemExit(f"{case.name}: {num_bytes} bytes, allowed: {MAX_FOLDER_BYTES}")
    return json.dumps({"name": case.name, "seed": seed, "bytes": num_bytes, "logits_std": round(float(np.std(golden["logits.0"])), 2)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; default: all")
    torch.set_num_threads(1)
    for case in [load_case(name) for name in parser.parse_args().names] or all_cases():
        print(write(case), flush=True)


if __name__ == "__main__":
    main()
