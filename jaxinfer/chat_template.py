"""Chat templates: Jinja as Hugging Face writes it, in a sandbox whose work is bounded."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

from jaxinfer.errors import RequestError

MAX_RENDERED_CHARS = 4 * 1024 * 1024
MAX_RENDER_SECONDS = 5.0
MAX_POWER_BASE = 10**6
MAX_POWER_EXPONENT = 32
CHECK_TIME = "_check_time"
TOO_LONG = f"the text is longer than the limit of {MAX_RENDERED_CHARS} characters"
ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What compiling or running a template can raise; a template is as foreign as the messages it is given."""


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set on the class

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox for one rendering, which ends at a deadline and multiplies no text beyond the limit.

    The clock is looked at wherever a template can spend time: each turn of a loop, calls, attributes, items, operators.
    It guards against templates that are wrong; it is no wall against one made to exhaust the machine (`~` can double
    a text unseen), so a template comes from the model or its operator and never from a request.
    """

    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self, deadline: float):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock])
        self.deadline = deadline
        self.filters["tojson"] = _to_json
        provided: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now, CHECK_TIME: self.check_time}
        self.globals.update(provided)

    def check_time(self) -> None:
        """Raises jinja2.TemplateError when the deadline is past."""
        if time.monotonic() > self.deadline:
            raise jinja2.TemplateError(f"rendering takes longer than the limit of {MAX_RENDER_SECONDS:g} s")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator, refused when its result would be huge."""
        self.check_time()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int) and len(sequence) * times > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateError(TOO_LONG)
        if operator == "**" and not (abs(left) <= MAX_POWER_BASE and abs(right) <= MAX_POWER_EXPONENT):
            raise jinja2.TemplateError(f"powers are limited to base {MAX_POWER_BASE} and exponent {MAX_POWER_EXPONENT}")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call, unless the time is up."""
        self.check_time()
        return super().call(context, function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, unless the time is up."""
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, unless the time is up."""
        self.check_time()
        return super().getitem(obj, argument)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for HTML and sorts keys; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class ChatTemplate:
    """A compiled template; rendering is thread-safe.

    Raises:
        RequestError: when the source is not a Jinja template.
    """

    def __init__(self, source: str):
        try:
            environment = BoundedEnvironment(0.0)
            tree = environment.parse(source)
            for loop in tree.find_all(jinja2.nodes.For):
                look_at_clock = jinja2.nodes.Call(jinja2.nodes.Name(CHECK_TIME, "load"), [], [], None, None)
                loop.body.insert(0, jinja2.nodes.ExprStmt(look_at_clock))
            tree.set_environment(environment)
            tree.set_lineno(1)  # only of the nodes that have none, which are the new ones
            self._code = environment.compile(tree, name="chat_template")
        except TEMPLATE_FAULTS as error:
            raise RequestError(f"the chat template is not valid Jinja: {error}", param="messages") from error

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation; `variables` are further names that the template may use (`bos_token`, `tools`).

        Raises:
            RequestError: for messages that are wrong or refused, and when rendering passes a limit of time or size.
        """
        checked = check_messages(messages)
        environment = BoundedEnvironment(time.monotonic() + MAX_RENDER_SECONDS)
        template = environment.template_class.from_code(environment, self._code, environment.make_globals(None))
        parts: list[str] = []
        num_chars = 0
        try:
            for part in template.generate(messages=checked, add_generation_prompt=add_generation_prompt, **variables):
                environment.check_time()
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateError(TOO_LONG)
                parts.append(part)
        except TEMPLATE_FAULTS as error:
            raise RequestError(
                f"messages: the chat template refuses them: {str(error) or type(error).__name__}", param="messages"
            ) from error
        return "".join(parts)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of a conversation as templates expect them: each with a role and its content as one string.

    Raises:
        RequestError: saying which message is wrong, and what is allowed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages must be a non-empty list of messages, got {messages!r:.80}", param="messages")
    return [_check_message(message, f"messages[{k}]") for k, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {message!r:.80}", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}", param="messages")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    return {**message, "role": role, "content": _content_text(content, f"{where}.content")}


def _content_text(content: Any, where: str) -> str:
    """Text content: a string, or a list of text parts, which are joined by newlines as other engines do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise RequestError(f"{where} must be a string or a non-empty list of text parts, got {content!r:.80}", param="messages")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{where} may hold only {{"type": "text", "text": "..."}} parts, got {part!r:.80}', param="messages")
    return "\n".join(part["text"] for part in content)
