"""Jinja environment for chat templates: as transformers sets it up, with bounds on its work.

A template comes out of a downloaded file: it can neither reach Python objects (Jinja's sandbox)
nor run or grow without end.
"""

import json
import sys
from collections.abc import Callable
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# An ordinary template runs about a hundred lines of its code for a message.
MAX_LINES = 5_000_000
MAX_CHARS = 1 << 26


class TemplateLimitError(TemplateRuntimeError):
    """The template ran or grew beyond its bounds."""


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        # Jinja's own code joins without asking how long the result is.
        self.write("environment.concat_bounded((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` marks answers for training; when chatting it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment; `now` is what `strftime_now` tells the template."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.now: datetime | None = None
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now

    def _strftime_now(self, format: str) -> str:
        return (self.now or datetime.now()).strftime(format)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` if the result stays within bounds."""
        if operator == "**":
            size = abs(right) * len(str(left)) if isinstance(right, int) else 0
        elif operator == "+":
            size = _length(left) + _length(right)
        else:
            size = max(_length(left) * _count(right), _length(right) * _count(left))
        _check_size(size)
        return super().call_binop(context, operator, left, right)

    def concat_bounded(self, parts: tuple[Any, ...]) -> str:
        """Join the parts of a `~` expression."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def run_bounded(render: Callable[[], str], filename: str) -> str:
    """Call `render`, counting the lines of template code that it runs.

    filename: the compiled template's file name, by which its code is known
    Raises TemplateLimitError after MAX_LINES.
    """
    left = MAX_LINES

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != filename:
            return None
        left -= 1
        if left < 0:
            raise TemplateLimitError("it runs without end")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        return render()
    finally:
        sys.settrace(previous)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateLimitError("it makes a text that is too long")


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _raise_exception(message: str) -> str:
    raise TemplateRuntimeError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers': not escaped for HTML, and not sorted."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
