"""`jaxinfer generate` with a fake model."""

from __future__ import annotations

import io

import pytest

from jaxinfer.cli.figures import AnswerFigures
from jaxinfer.cli.main import main
from jaxinfer.request import CompletionOutput, RequestDelta, RequestId
from tests.cli.fake_llm import FakeLLM

FIGURES = "start-up 3.50 s (load 1.00 s, compile 2.00 s for 7 programs)\n"


def test_a_prompt_streams_its_answer_and_figures_go_to_stderr(fake_llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "Hello", "--model", "m", "--quantization", "int8"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "four little words here\n"
    assert captured.err.startswith("4 tokens, time to first token ")
    assert " tokens/s, " in captured.err
    assert captured.err.endswith(FIGURES)
    assert captured.err.count("\n") == 1
    assert fake_llm.asked == ["Hello"]
    assert fake_llm.is_closed
    assert fake_llm.config is not None
    assert (fake_llm.config.model, fake_llm.config.quantization) == ("m", "int8")
    assert (fake_llm.params[0].temperature, fake_llm.params[0].max_tokens) == (0.0, 256)


def test_chat_makes_messages(fake_llm: FakeLLM) -> None:
    assert main(["generate", "--chat", "--system", "Be brief.", "--prompt", "Hello"]) == 0
    assert fake_llm.asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]]


def test_the_prompt_may_come_from_standard_input(fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" two\nlines\n\n"))
    assert main(["generate"]) == 0
    assert fake_llm.asked == [" two\nlines\n"]


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_several_prompts_are_a_batch(fake_llm: FakeLLM, chat: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fake_llm.reply = lambda asked: "one" if "a" in str(asked) and "bb" not in str(asked) else "two words"
    assert main(["generate", "--prompt", "a", "--prompt", "bb", *chat]) == 0
    captured = capsys.readouterr()
    assert captured.out == "[1] a\none\n\n[2] bb\ntwo words\n\n"
    assert captured.err.startswith("3 tokens for 2 prompts, mean time to first token 250 ms, ")
    assert captured.err.endswith(FIGURES)


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
def test_an_answer_that_breaks_off_is_an_error(fake_llm: FakeLLM, prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fake_llm.error = "device lost"
    assert main(["generate", *(word for prompt in prompts for word in ("--prompt", prompt))]) == 1
    assert "broke off: device lost\n" in capsys.readouterr().err
    assert fake_llm.is_closed


def test_the_rate_leaves_the_first_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 10.5, 11.0, 12.5])  # the start, then each delta with tokens
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    figures = AnswerFigures(started=next(moments))

    def delta(*tokens: int) -> RequestDelta:
        return RequestDelta(RequestId("r"), [CompletionOutput(0, list(tokens), "t")])

    assert list(figures.texts([delta(1, 2), delta(), delta(3), delta(4, 5, 6)])) == ["t"] * 4
    assert figures.line() == "6 tokens, time to first token 500 ms, 2.0 tokens/s"


def test_no_tokens_have_no_rate() -> None:
    assert AnswerFigures().line() == "no tokens"
