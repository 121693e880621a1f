"""Reading a model's configuration strictly: what is neither used nor known to be harmless is an error."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxinfer import models
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.layers.decoder import LayerKind
from jaxinfer.layers.latent_attention import LatentSpec, latent_scale
from jaxinfer.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
    yarn_magnitude,
)

HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "is_llama_config",
        "transformers.js_config",
        "pretraining_tp",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "auto_map",
        "attention_dropout",
        "hidden_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "attn_pdrop",
        "cache_implementation",
        "gradient_checkpointing",
        "num_labels",
        "_num_labels",
        "task_specific_params",
        "tokenizer_class",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "unsloth_fixed",
        "unsloth_version",
        "max_length",
        "length_penalty",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ]
)
"""Attributes that say nothing of the forward pass: names, training, how to generate (transformers 4 wrote that here too), and
where remote code would be, which is never run."""


class ConfigReader:
    """Takes attributes out of a config.json one by one; `finish` refuses what is left."""

    def __init__(self, config: Mapping[str, Any], file: str, prefix: str = ""):
        self.file = file
        self._config = config
        self._prefix = prefix
        self._left = set(config) - (HARMLESS if not prefix else frozenset())

    def fail(self, name: str, message: str) -> CheckpointError:
        """The error that an attribute makes no sense."""
        return CheckpointError(message, file=self.file, field=self._prefix + name)

    def unsupported(self, name: str, allowed: str) -> UnsupportedModelError:
        """The error that an attribute's value is not implemented."""
        return UnsupportedModelError(f"{self.file}: {self._prefix}{name} = {self._config.get(name)!r:.80} is not supported, only {allowed}")

    def _typed(self, name: str, value: Any, kind: type) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(name, f"must be {kind.__name__}, got {value!r:.60}")
        return value

    def required(self, name: str, kind: type) -> Any:
        """An attribute that must be there."""
        self._left.discard(name)
        if self._config.get(name) is None:
            raise self.fail(name, "is missing")
        return self._typed(name, self._config[name], kind)

    def positive(self, name: str, default: int | None = None) -> int:
        """A count: an integer from 1 to 2**31 - 1."""
        value = self.required(name, int) if default is None else self.optional(name, int, default)
        if not 1 <= value < 2**31:
            raise self.fail(name, f"must be from 1 to {2**31 - 1}, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.required(name, float) if default is None else self.optional(name, float, default)
        if not 0 < value < math.inf:
            raise self.fail(name, f"must be a positive number, got {value}")
        return value

    def cap(self, name: str, default: float | None = None) -> float | None:
        """A positive number; null, where it stands in the file, means none."""
        self._left.discard(name)
        return None if self._config.get(name, default) is None else self.number(name, default)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of so many positive finite numbers."""
        values = [self._typed(name, value, float) for value in self.required(name, list)]
        if len(values) != length or not all(0 < value < math.inf for value in values):
            raise self.fail(name, f"must be {length} positive numbers, got {values!r:.80}")
        return tuple(values)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """An attribute that has a default; null counts as absent."""
        self._left.discard(name)
        value = self._config.get(name)
        return default if value is None else self._typed(name, value, kind)

    def only(self, name: str, *allowed: Any) -> None:
        """An attribute that is supported with these values alone; null and absent count as the first."""
        self._left.discard(name)
        value = self._config.get(name)
        if value is not None and value not in allowed:
            raise self.unsupported(name, ", ".join(map(repr, allowed)))

    def ignore(self, *names: str) -> None:
        """Attributes that this model's forward pass does not read, whatever they are."""
        self._left -= set(names)

    def finish(self) -> None:
        """Refuse every attribute that has been neither read nor listed as harmless, unless it is null or false."""
        if not self._prefix:
            self.only("is_causal", True)  # false, in the files of some embedding models, asks for attention to what follows
        unused = sorted(name for name in self._left if self._config[name] not in (None, False, {}, []))
        if unused:
            name = unused[0]
            raise UnsupportedModelError(f"{self.file}: {self._prefix}{name} = {self._config[name]!r:.80} is not supported by this model")

    # ---- what several families share ---------------------------------------------------------------------------------

    def decoder_fields(
        self, *, norm_eps: float = 1e-6, is_tied: bool = False, head_dim: int | None = None, max_positions: int = 2048
    ) -> dict[str, Any]:
        """The fields of a DecoderConfig that all families have, under their usual names; the arguments are defaults."""
        size, num_heads = self.positive("hidden_size"), self.positive("num_attention_heads")
        fields = {
            "vocab_size": self.positive("vocab_size"),
            "size": size,
            "hidden_size": self.positive("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": self.positive("num_key_value_heads", default=num_heads),
            "head_dim": self.positive("head_dim", default=head_dim or max(1, size // num_heads)),
            "max_positions": self.positive("max_position_embeddings", default=max_positions),
            "norm_eps": self.number("rms_norm_eps", norm_eps),
            "is_tied": self.optional("tie_word_embeddings", bool, is_tied),
        }
        if num_heads % fields["num_kv_heads"]:
            raise self.fail("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), got {fields['num_kv_heads']}")
        return fields

    def window(self, default: int | None = 4096) -> int | None:
        """`sliding_window`; null, where it stands in the file, means none."""
        self._left.discard("sliding_window")
        return None if self._config.get("sliding_window", default) is None else self.positive("sliding_window", default)

    def expert_counts(self, name: str, *, default: int | None = None, default_chosen: int | None = None) -> tuple[int, int]:
        """How many experts a layer has, and how many of them a token goes to."""
        num_experts, num_chosen = self.positive(name, default), self.positive("num_experts_per_tok", default_chosen)
        if num_chosen > num_experts:
            raise self.fail("num_experts_per_tok", f"must be at most {name} ({num_experts}), got {num_chosen}")
        return num_experts, num_chosen

    def expert_groups(self, num_experts: int, num_chosen: int, min_in_group: int) -> tuple[int, int]:
        """DeepSeek's groups of experts, and how many of them a token may choose from; `min_in_group` make up a group's score."""
        num_groups, num_open = self.positive("n_group", default=1), self.positive("topk_group", default=1)
        if num_experts % num_groups or num_experts // num_groups < min_in_group:
            raise self.fail("n_group", f"must divide {num_experts} experts into groups of {min_in_group} at least, got {num_groups}")
        if num_open > num_groups or num_chosen > num_open * (num_experts // num_groups):
            raise self.fail("topk_group", f"{num_open} of {num_groups} groups have fewer than {num_chosen} experts, or do not exist")
        return num_groups, num_open

    def dense_layers(self, num_layers: int, *, default_first: int) -> frozenset[int]:
        """DeepSeek's layers without experts: the first ones, and those between every `moe_layer_freq`-th."""
        first, step = self.optional("first_k_dense_replace", int, default_first), self.positive("moe_layer_freq", default=1)
        return frozenset(index for index in range(num_layers) if index < first or index % step)

    def latent(self, fields: Mapping[str, Any], rope: Rope, *, is_interleaved: bool) -> LatentSpec:
        """DeepSeek's latent attention; `fields` are those of `decoder_fields`."""
        plain_dim = self.positive("qk_nope_head_dim", default=128)
        # Absent it is transformers' default; null means that queries have no latent.
        has_query_rank = self._config.get("q_lora_rank", 1536) is not None
        return LatentSpec(
            size=fields["size"],
            num_heads=fields["num_heads"],
            query_rank=self.positive("q_lora_rank", default=1536) if has_query_rank else None,
            kv_rank=self.positive("kv_lora_rank", default=512),
            plain_dim=plain_dim,
            rope_dim=rope.size,
            value_dim=self.positive("v_head_dim", default=128),
            scale=latent_scale(plain_dim + rope.size, rope),
            is_interleaved=is_interleaved,
            has_bias=self.optional("attention_bias", bool, False),
        )

    def layer_kinds(self, window: int | None, is_windowed: list[bool], window_rope: int = 0) -> tuple[LayerKind, ...]:
        """Each layer's window and rotation; `layer_types`, where there is such a list, instead of `is_windowed`."""
        types = self.optional("layer_types", list, ["sliding_attention" if windowed else "full_attention" for windowed in is_windowed])
        if len(types) != len(is_windowed):
            raise self.fail("layer_types", f"must have one entry for each of the {len(is_windowed)} layers, got {len(types)}")
        if not all(kind in ("sliding_attention", "full_attention") for kind in types):
            raise self.unsupported("layer_types", "'sliding_attention' and 'full_attention'")
        if window is None and "sliding_attention" in types:
            raise self.fail("sliding_window", "is missing, but layer_types has sliding_attention")
        return tuple(LayerKind(window=window, rope=window_rope) if kind == "sliding_attention" else LayerKind() for kind in types)

    def rope(
        self,
        *,
        head_dim: int,
        max_positions: int,
        default_theta: float = 10_000.0,
        theta_name: str = "rope_theta",
        layer_type: str | None = None,
        is_scaled: bool = True,
        is_partial: bool = False,
        aliases: Mapping[str, str] | None = None,
    ) -> Rope:
        """A rotation, from `rope_theta` and `rope_scaling` or from the `rope_parameters` that transformers 5 writes.

        Args:
            head_dim, max_positions: of the model.
            default_theta, theta_name: of this rotation's theta where it stands beside the scaling.
            layer_type: the key of `rope_parameters` under which this rotation may be nested.
            is_scaled: whether `rope_scaling` is about this rotation.
            is_partial: whether the family can rotate a part of each head.
            aliases: other names of rope types.

        Raises:
            CheckpointError: a number that makes no sense.
            UnsupportedModelError: a rope type, or an attribute of one, that is not implemented.
        """
        name, parameters = "rope_parameters", self.optional("rope_parameters", dict, {})
        if layer_type is not None and any(isinstance(value, dict) for value in parameters.values()):
            name, parameters = f"rope_parameters.{layer_type}", parameters.get(layer_type) or {}
            if not isinstance(parameters, dict):
                raise self.fail(name, f"must be dict, got {parameters!r:.60}")
        scaling = self.optional("rope_scaling", dict, {})
        if scaling and is_scaled:
            name, parameters = "rope_scaling", scaling
        reader = ConfigReader(parameters, self.file, prefix=f"{name}.")
        theta = reader.number("rope_theta", self.number(theta_name, default_theta))
        if theta <= 1:
            raise self.fail(theta_name, f"must be above 1, got {theta}")
        part = reader.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        if part > 1 or (part < 1 and not is_partial):
            raise UnsupportedModelError(f"{self.file}: partial_rotary_factor = {part} is not supported by this model")
        size = int(head_dim * part)
        if size < 4 or size % 2:
            raise self.fail("head_dim", f"a rotation needs an even number of entries, 4 at least, got {size}")
        original = self.positive("original_max_position_embeddings", default=max_positions)
        is_outside = self._config.get("original_max_position_embeddings") is not None
        kind = reader.optional("type", str, "default")
        kind = reader.optional("rope_type", str, kind)
        kind = (aliases or {}).get(kind, kind)
        if kind in ("llama3", "yarn", "longrope"):
            inside = reader.positive("original_max_position_embeddings", default=original)
            original = original if is_outside else inside
        rope = Rope(theta=theta, size=size, scaling=_scaling(reader, kind, size, original, max_positions))
        reader.finish()
        return rope


def _scaling(reader: ConfigReader, kind: str, size: int, original: int, max_positions: int) -> Scaling | None:
    """What a rope type is; formulas in `layers.rope`."""
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=reader.number("factor"))
    if kind == "dynamic":
        return DynamicScaling(factor=reader.number("factor"), original_positions=max_positions)
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if high <= low:
            raise reader.fail("high_freq_factor", f"must be above low_freq_factor ({low}), got {high}")
        return Llama3Scaling(factor=reader.number("factor"), low_freq_factor=low, high_freq_factor=high, original_positions=original)
    if kind == "yarn":
        return _yarn(reader, original, max_positions)
    if kind == "longrope":
        factor = reader.number("factor", max_positions / original)
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return LongRopeScaling(
            short_factors=reader.numbers("short_factor", size // 2),
            long_factors=reader.numbers("long_factor", size // 2),
            original_positions=original,
            magnitude=reader.number("attention_factor", magnitude),
        )
    raise reader.unsupported("rope_type" if kind == reader.optional("rope_type", str, "") else "type", ROPE_TYPES)


ROPE_TYPES = "default, linear, dynamic, llama3, yarn, longrope"


def _yarn(reader: ConfigReader, original: int, max_positions: int) -> YarnScaling:
    factor = reader.number("factor", max_positions / original)
    mscale, mscale_all = reader.optional("mscale", float, 0.0), reader.optional("mscale_all_dim", float, 0.0)
    magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all) if mscale and mscale_all else yarn_magnitude(factor)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        is_truncated=reader.optional("truncate", bool, True),
        magnitude=reader.number("attention_factor", magnitude),
        mscale_all_dim=mscale_all,
    )


def stretched_positions(rope: Rope, max_positions: int) -> int:
    """The context of a model whose `max_position_embeddings` may be that before scaling."""
    if isinstance(rope.scaling, LinearScaling | DynamicScaling):
        return int(max_positions * rope.scaling.factor)
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, int(rope.scaling.original_positions * rope.scaling.factor))
    return max_positions


def find(config: Mapping[str, Any], file: str) -> ModuleType:
    """The module of a configuration's `model_type`.

    Raises:
        CheckpointError: no `model_type`.
        UnsupportedModelError: no file of that name.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError("is missing", file=file, field="model_type")
    # The name becomes part of an import: nothing but an identifier may pass.
    if re.fullmatch(r"[a-z][a-z0-9_]*", model_type) and model_type != "config":
        try:
            return importlib.import_module(f"jaxinfer.models.{model_type}")
        except ModuleNotFoundError:
            pass
    known = sorted(module.name for module in pkgutil.iter_modules(models.__path__) if module.name != "config")
    raise UnsupportedModelError(f"{file}: model_type {model_type!r:.60} is not supported; there is: {', '.join(known)}")
