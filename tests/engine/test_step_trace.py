"""The timeline of steps, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

from jaxinfer.step_trace import StepTimes, StepTrace


def test_the_timeline_of_two_overlapping_steps(tmp_path: Path) -> None:
    """The second is launched at 3 ms, while the first runs until 5 ms: it cannot have begun before that."""
    trace = StepTrace()
    assert math.isnan(trace.share_ahead)
    trace.steps += [
        StepTimes(0, 4, 9, 0.0, 0.001, 0.001, 0.002, None, ready=0.005, update_end=0.006),
        StepTimes(1, 4, 4, 0.002, 0.003, 0.003, 0.004, True, ready=0.009, update_end=0.010),
        StepTimes(2, 4, 4, 0.006, 0.007, 0.010, 0.011, False, ready=0.012, update_end=0.013),
    ]
    assert trace.share_ahead == 0.5
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: (event["tid"], round(event["ts"]), round(event["dur"])) for event in events if event["ph"] == "X"}
    assert spans["step 0"] == (2, 1000, 4000)
    assert spans["step 1"] == (2, 5000, 4000), "from the end of step 0"
    assert spans["step 2"] == (2, 10000, 2000), "from its own launch"
    assert spans["update 1"] == (1, 9000, 1000) and spans["schedule 1"] == (1, 2000, 1000)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"host", "device (as seen by the host)"}
