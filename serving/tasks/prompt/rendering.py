"""Renders chat templates in a confined process: they come with a model and are not trusted.

The text is exactly that of transformers: the same code renders it, with the same variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...interface.errors import Overloaded, PackagingError, RequestError
from ...interface.request import ChatEnd
from ...sandbox import MAX_TEMPLATE, POOL, Ended, Exceeded, NoProcess, Share, render_limits

_MESSAGE_TOOLS = re.compile(r"""\w\s*\[\s*['"]tools['"]\s*\]|['"]tools['"] in \w+""")


class Renderer:
    """The renderer of the chat templates of one tokenizer.

    With ``parts``, the content of every message is a list of parts, as templates of vision-language models read it.
    A tokenizer class with its own rendering code renders here, in this process: that code has been allowed to run.
    """

    def __init__(self, tokenizer: Any, *, parts: bool = False) -> None:
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        self._own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        self._share = Share()
        self._parts = parts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str,
        variables: Mapping[str, Any],
        context: int | None,
        end: ChatEnd = "generation_prompt",
    ) -> str:
        """Return the text of a chat.

        Raises ``confined.Refused`` if the template raises an error, ``RequestError`` if it takes too much time or
        memory, ``Overloaded`` if no process can render it now.
        """
        try:
            return self.text(messages, source, variables, context, end)
        except Exceeded as error:
            raise RequestError(
                f"messages: the model's chat template was stopped: it took {error}", param="messages"
            ) from None
        except (Ended, NoProcess) as error:
            raise Overloaded(f"the chat template cannot be rendered now: {error}", retry_after=1.0) from None

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str,
        variables: Mapping[str, Any],
        context: int | None = None,
        end: ChatEnd = "generation_prompt",
    ) -> str:
        """Return the text of a chat. Raises the same errors as ``confined.Pool.run``."""
        if self._parts:
            messages = [_in_parts(message) for message in messages]
        if self._own:
            found: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=source,
                add_generation_prompt=end == "generation_prompt",
                continue_final_message=end == "open",
                tokenize=False,
                **variables,
            )
            return found
        # as in transformers: null counts as absent, and a variable replaces a special token of the same name
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        named = {**self._tokenizer.special_tokens_map, **variables}
        limits = render_limits(_size(given) + _size(variables), context)
        text: str = POOL.run(
            "render",
            limits,
            source=source,
            share=self._share,
            messages=given,
            variables=named,
            output=limits.output,
            end=end,
        )
        return text


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


class TemplateReads:
    """The parts of a request that a chat template reads.

    ``variables`` are the names that ``source`` takes from outside; None if they cannot be determined. ``tool_calls``
    says whether it reads those. ``tools`` says whether it reads the tools as a variable or in the system message; None
    if it does not read them. Raises the same errors as ``confined.Pool.run``.
    """

    def __init__(self, source: str) -> None:
        self.tool_calls = "tool_calls" in source
        found = POOL.run("reads", render_limits(len(source), None), source=source)
        self.variables: frozenset[str] | None = None if found is None else frozenset(found)
        self.tools: Literal["variable", "message"] | None = None
        if "tools" in source if found is None else "tools" in found:
            self.tools = "variable"
        elif _MESSAGE_TOOLS.search(source):
            self.tools = "message"


def read_template(name: str, source: str) -> TemplateReads:
    """Return what a template reads. Raises ``PackagingError`` if finding that out exceeds the limits."""
    check_length(name, source)
    try:
        return TemplateReads(source)
    except (Exceeded, Ended, NoProcess) as error:
        raise PackagingError(f"chat_template {name!r}: it cannot be read: {error}") from None


def check_length(name: str, source: str) -> None:
    """Raise ``PackagingError`` for more than ``MAX_TEMPLATE`` characters; no model's template is that long."""
    if len(source) > MAX_TEMPLATE:
        raise PackagingError(f"chat_template {name!r}: {len(source)} characters; at most {MAX_TEMPLATE} are allowed")


def _size(value: Any) -> int:
    """Estimate the size of ``value`` as JSON, in bytes; the estimate is at most four times too small."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(entry) for key, entry in value.items()) + 2
    return sum(map(_size, value)) + 2 if isinstance(value, list | tuple) else 8
