"""The runner apart from the engine: tokens that feed back on the device."""

from __future__ import annotations

import numpy as np

from jaxinfer.batching import logit_rows
from jaxinfer.messages import SchedulerOutput
from jaxinfer.request import SamplingParams
from jaxinfer.sampling.batch import SamplingRow
from tests.engine.lookup_model import continuation, make_engine
from tests.engine.test_batching import row


def test_a_sampled_token_feeds_the_next_step_without_the_host() -> None:
    """The host sends a wrong id and says it is fed back: the device must take the token it sampled itself."""
    runner = make_engine().runner
    prompt = [40, 41, 42, 43, 44]
    first = row(2, prompt, 0, [3, 4], is_sampling=True)
    sampling = [SamplingRow(SamplingParams(temperature=0.0), 2, (0, 0), 5, None, {})]
    output = SchedulerOutput([first], 5, 1, [])
    launched = runner.launch(output, logit_rows([first]), sampling)
    second = row(2, [0], 5, [3, 4], is_sampling=True)
    second.is_fed_back, second.is_first_of_slot = True, False
    logits = np.asarray(runner.forward(SchedulerOutput([second], 1, 1, []), logit_rows([second])))
    assert launched.result().token_ids == [[continuation(prompt, 1)[0]]]
    assert int(logits[0, :257].argmax()) == continuation(prompt, 2)[1]
