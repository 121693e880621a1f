"""What a person may set. Architecture is `models.ModelConfig`, kernel tuning lives with the kernels; this is deployment.

Every field here is a command-line option of the same name (`block_size` is `--block-size`): `cli/options.py` reads the
dataclasses, so a new field needs no second place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from jaxinfer.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["auto", "none", "int8", "int8_weight_only", "int4"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
AttentionImplementation = Literal["auto", "native", "xla", "reference", "mosaic"]
GROUP_SIZES = (32, 64, 128)
OnOff = Literal["on", "off"]
AutoOnOff = Literal["auto", "on", "off"]
PreemptionMode = Literal["auto", "swap", "recompute"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]

MAX_TENSOR_PARALLEL_SIZE = 64
MAX_SECONDS = 86_400.0


def option_name(field_name: str) -> str:
    """`block_size` -> `--block-size`."""
    return "--" + field_name.replace("_", "-")


def _check_range(config: Any, name: str, low: int, high: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{option_name(name)} must be an integer from {low} to {high}, got {value!r}", option=option_name(name))


def _check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{option_name(name)} must be one of {', '.join(allowed)}, got {value!r}", option=option_name(name))


def _check_seconds(config: Any, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN compares false
        raise ConfigError(
            f"{option_name(name)} must be a number of seconds from {low:g} to {high:g}, got {value!r}", option=option_name(name)
        )


def option(default: Any, help: str) -> Any:
    """A dataclass field that carries its help text for the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The KV pool."""

    block_size: int = option(16, "tokens in one KV block (a power of two)")
    num_kv_blocks: int | None = option(
        None, "usable KV blocks; default: what max-num-seqs sequences of max-model-len need, within the memory that is free"
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto", "keys and values: float32, bfloat16, or int8 or fp8 (e4m3) with a scale per token and head; auto: as the activations"
    )
    prefix_caching: OnOff = option(
        "on", "reuse KV blocks of equal prompt prefixes; full blocks only, the last prompt token is always computed"
    )
    preemption: PreemptionMode = option(
        "auto", "what a sequence that must give up its blocks does with them: swap (to host memory), recompute, or by measured cost"
    )
    host_kv_bytes: int | None = option(
        None, "host memory for KV blocks that left the device; 0: none; default: as much as the pool has, at most an eighth of what is free"
    )
    disk_kv_path: Path | None = option(None, "folder for KV blocks that left host memory; they survive a restart; default: none")
    disk_kv_bytes: int = option(8 * 2**30, "most bytes of KV blocks in disk-kv-path")
    kv_checksums: OnOff = option("off", "check a CRC of every block that comes back from host memory (for debugging; slow)")

    def __post_init__(self) -> None:
        _check_range(self, "block_size", 1, 1024)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {self.block_size}", option="--block-size")
        if self.num_kv_blocks is not None:
            _check_range(self, "num_kv_blocks", 1, 2**31 // max(self.block_size, 1) - 1)
        _check_choice(self, "kv_cache_dtype", get_args(KVCacheDtype))
        _check_choice(self, "prefix_caching", ("on", "off"))
        _check_choice(self, "preemption", get_args(PreemptionMode))
        _check_choice(self, "kv_checksums", ("on", "off"))
        if self.host_kv_bytes is not None:
            _check_range(self, "host_kv_bytes", 0, 2**50)
        _check_range(self, "disk_kv_bytes", 2**20, 2**50)
        self._check_tiers()

    def _check_tiers(self) -> None:
        """A tier that could never be used is an error, not a silent nothing."""
        if self.preemption == "swap" and self.host_kv_bytes == 0:
            raise ConfigError("--preemption swap needs host memory, got --host-kv-bytes 0", option="--preemption")
        if self.disk_kv_path is not None:
            if self.host_kv_bytes == 0:
                raise ConfigError("--disk-kv-path takes what leaves host memory, got --host-kv-bytes 0", option="--disk-kv-path")
            if self.prefix_caching == "off":
                raise ConfigError("--disk-kv-path keeps cached prefixes, got --prefix-caching off", option="--disk-kv-path")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_seqs: int = option(32, "sequences running at once")
    max_num_batched_tokens: int = option(512, "tokens in one step; longer prompts are prefilled in chunks")
    max_model_len: int | None = option(None, "prompt plus output tokens of one sequence; default: the model's context, at most 8192")
    scheduling_policy: SchedulingPolicy = option(
        "priority", "who runs next: fcfs (arrival), priority (lower first, arrival within one), fair (least served user first)"
    )
    async_scheduling: OnOff = option("on", "plan and launch the next step while one runs; sampled tokens stay on the device")
    long_prefill_token_threshold: int | None = option(
        None, "most tokens of one prompt in one step, so that others get into it; default: no limit but the step's own"
    )
    max_num_partial_prefills: int | None = option(None, "prompts that may be computed in parts at the same time; default: any number")
    request_timeout: float | None = option(None, "seconds after which a request is ended, wherever it stands; default: never")

    def __post_init__(self) -> None:
        _check_range(self, "max_num_seqs", 1, 4096)
        _check_choice(self, "scheduling_policy", get_args(SchedulingPolicy))
        _check_choice(self, "async_scheduling", ("on", "off"))
        for name, high in (("long_prefill_token_threshold", 2**24), ("max_num_partial_prefills", 4096)):
            if getattr(self, name) is not None:
                _check_range(self, name, 1, high)
        if self.request_timeout is not None:
            _check_seconds(self, "request_timeout", 0.001, MAX_SECONDS)
        _check_range(self, "max_num_batched_tokens", 1, 2**20)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs ({self.max_num_seqs}): "
                "each running sequence takes a token of the step",
                option="--max-num-batched-tokens",
            )
        if self.max_model_len is not None:
            _check_range(self, "max_model_len", 2, 2**24)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tensor_parallel_size: int = option(1, "devices that share each layer; on a CPU virtual devices are made")

    def __post_init__(self) -> None:
        _check_range(self, "tensor_parallel_size", 1, MAX_TENSOR_PARALLEL_SIZE)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an Engine is built from.

    Raises:
        ConfigError: naming the option, for any value out of its range.
    """

    model: str = option("smollm2-135m", "a preset's name, a GGUF file, a Hugging Face folder or a Hub id")
    dtype: Dtype = option("auto", "activations and KV: float32, bfloat16; auto: float32 on a CPU, bfloat16 elsewhere")
    quantization: Quantization = option(
        "auto",
        "weights: none (floats), int8 (W8A8, activations rounded per token), int8_weight_only (W8A16), int4 (W4A16, in groups); "
        "auto: as the checkpoint stores them",
    )
    quantization_group_size: int = option(32, "weights that share a scale in int4: 32, 64 or 128")
    quantization_zero_point: AutoOnOff = option(
        "auto", "int4 with a zero point per group; auto: where the measured table says it is closer"
    )
    quantize_embeddings: AutoOnOff = option(
        "auto", "quantize the vocabulary's matrices (embedding, output) too; auto: on, but to int8 where int4 is measured to be too coarse"
    )
    seed: int = option(0, "seed of the stream that gives unseeded requests their seeds; 0: drawn from the system")
    batch_invariant: AutoOnOff = option("auto", "same bits for a request in any company; auto: on where it costs under 5 %")
    attention_implementation: AttentionImplementation = option(
        "auto",
        "what computes attention: native (C++, for a CPU), xla, reference (slow, to compare with) or mosaic (for a GPU from Hopper on; "
        "elsewhere interpreted, which is for debugging); auto: the fastest that runs here",
    )
    compile_cache_dir: Path | None = option(None, "where compiled programs are kept; default: jaxinfer/compiled in the user's cache folder")
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"--model must be a preset, a path or a Hub id, got {self.model!r}", option="--model")
        _check_choice(self, "dtype", ("auto", "float32", "bfloat16"))
        _check_choice(self, "quantization", get_args(Quantization))
        if self.quantization_group_size not in GROUP_SIZES:
            raise ConfigError(
                f"--quantization-group-size must be one of {', '.join(map(str, GROUP_SIZES))}, got {self.quantization_group_size!r}",
                option="--quantization-group-size",
            )
        _check_choice(self, "quantization_zero_point", get_args(AutoOnOff))
        _check_choice(self, "quantize_embeddings", get_args(AutoOnOff))
        self._check_quantization_options()
        _check_choice(self, "batch_invariant", ("auto", "on", "off"))
        _check_choice(self, "attention_implementation", get_args(AttentionImplementation))
        _check_range(self, "seed", 0, 2**63 - 1)

    def _check_quantization_options(self) -> None:
        """What says something of one method only is not accepted beside another and ignored."""
        is_asked = {
            "quantization_group_size": self.quantization_group_size != GROUP_SIZES[0],
            "quantization_zero_point": self.quantization_zero_point != "auto",
        }
        for name, asked in is_asked.items():
            if asked and self.quantization != "int4":
                raise ConfigError(
                    f"{option_name(name)} is for --quantization int4, got --quantization {self.quantization}", option=option_name(name)
                )
        if self.quantize_embeddings == "on" and self.quantization == "none":
            raise ConfigError("--quantize-embeddings on needs a --quantization, got none", option="--quantize-embeddings")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat options (`block_size=16, model=...`), as keyword arguments of LLM and the command line give them.

        Raises:
            ConfigError: for an option that does not exist.
        """
        parts: dict[str, dict[str, Any]] = {"": {}, "cache": {}, "scheduler": {}, "parallel": {}}
        owner = {f.name: part for part, kind in SECTIONS.items() for f in fields(kind)}
        owner |= {f.name: "" for f in fields(cls) if f.name not in SECTIONS}
        for name, value in options.items():
            if name not in owner:
                raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(owner))}", option=option_name(name))
            parts[owner[name]][name] = value
        return cls(**parts[""], **{part: kind(**parts[part]) for part, kind in SECTIONS.items()})


SECTIONS: dict[str, type] = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
"""EngineConfig's fields that are dataclasses themselves; their options are flat on the command line."""
