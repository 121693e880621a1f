from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.cli.main import main
from jaxinfer.simulation import plot

SMALL = ["simulate", "--num-requests", "30", "--max-output-len", "40", "--request-rate", "100", "--max-model-len", "512"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as left:
        code = int(str(left.code))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["num_ended"] == ["30"]
    assert rows["num_refused"] == ["0"]
    assert rows["kv_waste"][1] == "%"
    assert rows["ttft_p50"][1] in ("ms", "s")


def test_json_has_the_figures_and_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--json", "--num-kv-blocks", "77")
    (one,) = json.loads(out)
    assert code == 0
    assert one["ended_by_reason"] == {"stop": 30}
    assert one["options"]["num_kv_blocks"] == 77
    assert one["options"]["trace"] == "sharegpt"


def test_a_comparison_runs_the_same_trace_with_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--json", "--compare", "max-num-seqs=1,16")
    alone, many = json.loads(out)
    assert code == 0
    assert (alone["name"], many["name"]) == ("1", "16")
    assert (alone["options"]["max_num_seqs"], many["options"]["max_num_seqs"]) == (1, 16)
    assert alone["num_ended"] == many["num_ended"] == 30
    assert alone["mean_running"] <= 1 < many["mean_running"]
    assert alone["simulated_seconds"] > many["simulated_seconds"]
    _, table, _ = run(capsys, *SMALL, "--compare", "max-num-seqs=1,16")
    assert table.splitlines()[0].split() == ["1", "16"]


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.png"
    code, _, err = run(capsys, *SMALL, "--plot", str(path), "--compare", "scheduling-policy=fcfs,fair")
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None if name == "matplotlib" else util.find_spec(name))
    code, out, err = run(capsys, *SMALL, "--plot", str(tmp_path / "a.png"))
    assert (code, out) == (1, "")
    assert err == "jaxinfer: error: --plot needs matplotlib, which is not installed: pip install 'jaxinfer[notebooks]'\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--trace", "chats"], 2, "invalid choice: 'chats'"),
        (["--turns", "3"], 1, "--turns is for agents, got it with sharegpt"),
        (["--burst-seconds", "3"], 1, "--burst-seconds is for --arrivals bursts"),
        (["--arrivals", "at-once", "--request-rate", "3"], 1, "--request-rate says nothing about --arrivals at-once"),
        (["--request-rate", "0"], 1, "--request-rate must be a number above 0"),
        (["--request-rate", "nan"], 1, "--request-rate must be a number above 0"),
        (["--num-requests", "0"], 1, "--num-requests must be an integer from 1"),
        (["--num-users", "-2"], 1, "--num-users must be an integer from 1"),
        (["--trace-file", "nowhere.jsonl"], 1, "--trace-file must be a file of JSON lines, got 'nowhere.jsonl'"),
        (
            ["--trace-file", "nowhere.jsonl", "--num-users", "3"],
            1,
            "--num-users is for sharegpt, documents, agents, got it with a trace file",
        ),
        (["--timing", "a100"], 1, "--timing must be one of h200-llama-8b, cpu-smollm2 or a JSON file, got 'a100'"),
        (["--compare", "policy=a,b"], 1, "--compare: there is no option 'policy'"),
        (["--compare", "scheduling-policy=fair"], 1, "--compare must be OPTION=A,B with two values or more"),
        (["--compare", "scheduling-policy=fair,best"], 2, "invalid choice: 'best'"),
        (["--compare", "max-num-seqs=4,0"], 1, "--max-num-seqs must be an integer from 1"),
        (["--simulated-disk", "on", "--prefix-caching", "off"], 1, "--simulated-disk keeps cached prefixes that leave host memory"),
        (["--host-kv-bytes", "1"], 1, "--host-kv-bytes must hold a block of 2.09715e+06 bytes, or be 0, got 1"),
        (["--allocation", "static", "--num-kv-blocks", "2"], 1, "--allocation static sets aside --max-model-len 8192 tokens"),
        (["--kv-checksums", "on"], 2, "unrecognized arguments: --kv-checksums on"),
        (["--plot", "queue.txt"], 1, "--plot must be a .png, .svg or .pdf file, got 'queue.txt'"),
        (["--plot", "no/such/folder/a.png"], 1, "--plot must be a file in a folder that exists"),
    ],
)
def test_a_bad_option_is_told_in_one_line(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    got, out, err = (
        run(capsys, "simulate", "--num-requests", "5", *words) if "--num-requests" not in words else run(capsys, "simulate", *words)
    )
    assert (got, out) == (code, "")
    assert err.count("\n") == 1
    assert message in err


def test_the_simulator_leaves_jax_out() -> None:
    program = "import sys, jaxinfer.cli.simulate as one, jaxinfer.simulation.report, jaxinfer.simulation.run, jaxinfer.simulation.server"
    program += "; print(sorted({'jax', 'jaxlib', 'flax', 'aiohttp'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


def test_the_command_line_is_built_without_numpy() -> None:
    program = "import sys, jaxinfer.cli.simulate; print(sorted({'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    ended: Any = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[]\n")
