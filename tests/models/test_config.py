"""config.json is read strictly, in the form in which models are published and in the one that transformers writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer import sharding
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxinfer.models.config import ConfigReader, find
from tests.models.case import Case, all_cases, changed_config, load_case
from tests.models.golden_engine import read_config

FILE = "folder/config.json"
CASES = [pytest.param(case, id=case.name) for case in all_cases()]
YARN = load_case("llama_yarn").config
LLAMA3 = load_case("llama_llama3").config
PHI3 = load_case("phi3").config


def read(config: Mapping[str, Any]) -> Any:
    return find(config, FILE).Config.from_hf(config, FILE)


@pytest.mark.parametrize("case", CASES)
def test_both_forms_are_one_model(case: Case) -> None:
    assert read(case.config) == read(read_config(case.folder))


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_attribute_is_named(case: Case) -> None:
    for config in (case.config, read_config(case.folder)):
        with pytest.raises(UnsupportedModelError, match=rf"{FILE}: new_trick = 7 is not supported"):
            read({**config, "new_trick": 7})
        assert read({**config, "new_trick": None}) == read(config), "null says that it is not used"


@pytest.mark.parametrize("case", CASES)
def test_an_attribute_of_one_value_is_refused_with_another(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a family passes to `only` is collected, then set to something else."""
    asked: dict[str, tuple[Any, ...]] = {}
    only = ConfigReader.only

    def record(self: ConfigReader, name: str, *allowed: Any) -> None:
        asked[name] = allowed
        only(self, name, *allowed)

    monkeypatch.setattr(ConfigReader, "only", record)
    read(case.config)
    assert asked
    for name, allowed in asked.items():
        wrong = not allowed[0] if allowed and isinstance(allowed[0], bool) else "something else"
        with pytest.raises(UnsupportedModelError, match=rf"{FILE}: {name} = {wrong!r} is not supported"):
            read({**case.config, name: wrong})
        for value in allowed:
            read({**case.config, name: value})


@pytest.mark.parametrize(
    "name", sorted({case.config["model_type"]: case.name for case in all_cases() if "n_embd" not in case.config}.values())
)
def test_rope_scaling_is_read_strictly(name: str) -> None:
    config = load_case(name).config
    for scaling, words in (
        ({"rope_type": "spiral", "factor": 2.0}, r"rope_scaling\.rope_type = 'spiral' is not supported, only default, linear"),
        ({"type": "spiral", "factor": 2.0}, r"rope_scaling\.type = 'spiral' is not supported, only default, linear"),
        ({"rope_type": "linear", "factor": 2.0, "twist": 3}, r"rope_scaling\.twist = 3 is not supported"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, r"rope_scaling\.mrope_section"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            read({**config, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**YARN, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({**YARN, "rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({**YARN, "rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor"),
        ({**YARN, "rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor"),
        ({**YARN, "rope_scaling": {"type": 4}}, "rope_scaling.type"),
        ({**YARN, "rope_scaling": [4]}, "rope_scaling"),
        ({**YARN, "rope_scaling": {**YARN["rope_scaling"], "beta_fast": -1}}, "rope_scaling.beta_fast"),
        ({**YARN, "rope_theta": 0}, "rope_theta"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta"),
        ({**YARN, "head_dim": 15}, "head_dim"),
        ({**YARN, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**YARN, "hidden_size": 2**31}, "hidden_size"),
        ({**YARN, "num_hidden_layers": True}, "num_hidden_layers"),
        ({**YARN, "rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({**YARN, "vocab_size": None}, "vocab_size"),
        ({**LLAMA3, "rope_scaling": {**LLAMA3["rope_scaling"], "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
        ({**PHI3, "rope_scaling": {**PHI3["rope_scaling"], "long_factor": [1.0, 2.0]}}, "rope_scaling.long_factor"),
        ({**PHI3, "rope_scaling": {**PHI3["rope_scaling"], "short_factor": [1.0, 2.0, 0, 1]}}, "rope_scaling.short_factor"),
        ({**load_case("qwen2").config, "layer_types": ["full_attention"]}, "layer_types"),
        ({**load_case("gemma2").config, "sliding_window": None}, "sliding_window"),
        ({**load_case("gemma2").config, "sliding_window": 0}, "sliding_window"),
        ({**load_case("gpt2").config, "n_head": 5}, "n_head"),
    ],
)
def test_a_number_that_makes_no_sense_is_a_checkpoint_error(config: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    assert (caught.value.file, caught.value.field) == (FILE, field)


def test_values_that_are_not_implemented_are_named() -> None:
    for config, words in (
        ({**load_case("qwen2").config, "layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({**load_case("llama").config, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**load_case("gemma3_text").config, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            read(config)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("llama", {"pretraining_tp": 1, "rope_interleaved": False, "attention_dropout": 0.1, "eos_token_id": [1, 2]}),
        ("qwen2", {"use_mrope": False, "attention_dropout": 0.0}),
        ("gemma2", {"cache_implementation": "hybrid", "hidden_act": "gelu"}),
        ("gemma3_text", {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}),
        ("phi3", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "full_attn_mod": 1, "interpolate_factor": 1}),
        ("gpt2", {"task_specific_params": {"text-generation": {"do_sample": True}}, "reorder_and_upcast_attn": True}),
    ],
)
def test_what_published_files_carry_beside_changes_nothing(name: str, attributes: dict[str, Any]) -> None:
    config = load_case(name).config
    assert read({**config, **attributes}) == read(config)


def test_windows() -> None:
    """Null means no window, absence what transformers takes then."""
    mistral, qwen3 = load_case("mistral").config, load_case("qwen3").config
    assert read({**mistral, "sliding_window": None}).windows == (None,)
    assert read({key: value for key, value in mistral.items() if key != "sliding_window"}).windows == (4096,)
    assert read({**qwen3, "sliding_window": 8}).windows == (None,), "use_sliding_window is false"
    assert read({**qwen3, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}).windows == (None, 8)
    gemma3 = changed_config(load_case("gemma3_text").config, {"sliding_window_pattern": None, "num_hidden_layers": 12})
    assert [layer.window for layer in read(gemma3).layers] == [10, 10, 10, 10, 10, None] * 2
    assert [layer.rope for layer in read(gemma3).layers] == [1, 1, 1, 1, 1, 0] * 2


def test_scaling_stretches_the_context() -> None:
    assert read(load_case("llama_linear").config).max_positions == 16 * 4
    assert read(load_case("llama_dynamic").config).max_positions == 16 * 4
    assert read({**YARN, "max_position_embeddings": 16}).max_positions == 16 * 4
    assert read(LLAMA3).max_positions == 64
    assert read(load_case("gemma3_text").config).max_positions == 128, "its max_position_embeddings is that after scaling"


def test_a_split_with_a_remainder_is_refused() -> None:
    mesh = sharding.make_mesh(3)
    for name in ("llama", "phi3"):
        config = load_case(name).config
        with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 does not divide the model's num_key_value_heads \(2\)"):
            find(config, FILE).Model(read(config), mesh, jnp.dtype("float32"), 16)
