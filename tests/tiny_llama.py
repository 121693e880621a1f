"""A small Llama with random weights, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
}


def write_tiny_llama(folder: Path, *, tokenizer_from: Path, seed: int = 0, **changes: Any) -> Path:
    """Write config.json, model.safetensors and the tokenizer of another checkpoint; `changes` go into config.json.

    Weights are normal with variance 1 / inputs. The embedding is 8 times that, so that different tokens give clearly
    different hidden states, and norms are scaled around 1, so that forgetting one is seen.
    """
    from jaxinfer.checkpoints import open_checkpoint

    donor = open_checkpoint(str(tokenizer_from))
    folder.mkdir(parents=True)
    donor.load_tokenizer().save(folder)
    from_donor = {key: donor.config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id") if key in donor.config}
    config = TINY | from_donor | changes
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Tensors by Hugging Face's names, float32, `[outputs, inputs]`."""
    draws = np.random.default_rng(seed)
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_query, num_kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))

    def matrix(num_outputs: int, num_inputs: int) -> np.ndarray:
        return (draws.standard_normal((num_outputs, num_inputs)) / np.sqrt(num_inputs)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * draws.standard_normal(width)).astype(np.float32)

    weights = {"model.embed_tokens.weight": 8 * matrix(vocab, width), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(num_query, width),
            f"{at}.self_attn.k_proj.weight": matrix(num_kv, width),
            f"{at}.self_attn.v_proj.weight": matrix(num_kv, width),
            f"{at}.self_attn.o_proj.weight": matrix(width, num_query),
            f"{at}.mlp.gate_proj.weight": matrix(inner, width),
            f"{at}.mlp.up_proj.weight": matrix(inner, width),
            f"{at}.mlp.down_proj.weight": matrix(width, inner),
        }
    return weights
