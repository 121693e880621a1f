"""`jaxinfer chat` with a fake model."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest

from jaxinfer.cli.chat import stop_on_interrupt
from jaxinfer.cli.main import main
from jaxinfer.errors import RequestError
from tests.cli.fake_llm import FakeLLM


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, options: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return main(["chat", *options])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def last_word(messages: Any) -> str:
    return f"you said {messages[-1]['content']}"


def test_a_conversation_remembers(fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_llm.reply = last_word
    assert talk(monkeypatch, "[b]one[/b] :smile:", "", "two") == 0
    assert fake_llm.asked == [
        [user("[b]one[/b] :smile:")],
        [user("[b]one[/b] :smile:"), assistant("you said [b]one[/b] :smile:"), user("two")],
    ]
    assert "you said [b]one[/b] :smile:\n4 tokens, time to first token" in capsys.readouterr().out
    assert fake_llm.is_closed


def test_commands(fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a", "/reset", "b", "/system Rhyme.", "c", "/system", "d", "/help", "/nonsense", "/exit", "never"]
    assert talk(monkeypatch, *lines, options=("--system", "Be brief.")) == 0
    first = [message for messages in fake_llm.asked for message in [messages]]
    assert first == [
        [system("Be brief."), user("a")],
        [system("Be brief."), user("b")],
        [system("Rhyme."), user("c")],
        [user("d")],
    ]
    shown = capsys.readouterr().out
    assert "unknown command /nonsense" in shown
    assert all(command in shown for command in ("/reset", "/system TEXT", "/help", "/exit"))


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    presses = iter([lambda: None, lambda: os.kill(os.getpid(), signal.SIGINT)])
    fake_llm.between = lambda: next(presses, lambda: None)()
    assert talk(monkeypatch, "a", "b") == 0
    assert fake_llm.num_closed_early == 1
    assert fake_llm.asked[1] == [user("a"), assistant("four little words"), user("b")]
    assert "\nstopped, 3 tokens" in capsys.readouterr().out


def test_a_second_ctrl_c_interrupts_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_interrupt() as presses:
        os.kill(os.getpid(), signal.SIGINT)
        assert presses == [True]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_question_is_told_and_forgotten(
    fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_long(messages: Any) -> str:
        if len(messages[-1]["content"]) > 5:
            raise RequestError("prompt has 99 tokens, at most 63")
        return "yes"

    fake_llm.reply = refuse_long
    assert talk(monkeypatch, "much too long", "b") == 0
    assert fake_llm.asked[1] == [user("b")]
    assert "prompt has 99 tokens, at most 63" in capsys.readouterr().out
