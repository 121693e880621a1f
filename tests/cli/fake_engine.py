"""The real scheduler and pool, without a model: every sampled token is 1 and every step takes one second."""

from __future__ import annotations

from jaxinfer.client import EngineDescription
from jaxinfer.config import SchedulerConfig
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.messages import StepOutput
from jaxinfer.request import CompletionOutput, GenerationRequest, RequestDelta
from jaxinfer.scheduler import Scheduler

TENSOR = KVTensorSpec(name="k", num_heads=1, head_dim=1, dtype="float32")
FULL = KVGroupSpec(kind="full", layers=(0,), tensors=(TENSOR,))
WINDOW = KVGroupSpec(kind="window", layers=(1,), tensors=(TENSOR,), window=16)


class FakeEngine:
    """What a benchmark uses of an Engine."""

    def __init__(self, description: EngineDescription):
        self.description = description
        pools = GroupedPools([FULL], [description.num_kv_blocks], description.block_size)
        config = SchedulerConfig(max_num_seqs=description.max_num_seqs, max_num_batched_tokens=64)
        self.scheduler = Scheduler(config, pools, max_model_len=description.max_model_len, max_num_logit_rows=64)
        self.now = 0.0
        self.requests: list[GenerationRequest] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self.scheduler.add(request)

    def step(self) -> list[RequestDelta]:
        self.now += 1
        output = self.scheduler.schedule()
        assert output is not None
        step = StepOutput([[1] if row.is_sampling else [] for row in output.scheduled])
        return [
            RequestDelta(update.request_id, [CompletionOutput(0, update.token_ids)], update.finish_reason is not None)
            for update in self.scheduler.update(output, step)
        ]
