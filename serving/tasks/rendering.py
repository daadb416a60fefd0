"""Chat templates come with a model and are not trusted: they are rendered in a confined process.

The text is transformers' own, to the letter: the same code renders, with the same variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..confined import MAX_TEMPLATE, POOL, Ended, Exceeded, NoProcess, Share, render_limits
from ..errors import Overloaded, PackagingError, RequestError
from ..request import ChatEnd

_MESSAGE_TOOLS = re.compile(r"""\w\s*\[\s*['"]tools['"]\s*\]|['"]tools['"] in \w+""")


class Renderer:
    """Renders for one tokenizer. A tokenizer class that renders by code of its own, which was allowed to run,
    is asked itself."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        self._own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        self._share = Share()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str,
        variables: Mapping[str, Any],
        context: int | None,
        end: ChatEnd = "generation_prompt",
    ) -> str:
        """Raises ``confined.Refused`` where the template does, ``RequestError`` where it takes too much."""
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
        """Raises what ``confined.Pool.run`` does."""
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
        # as transformers has it: null says nothing, and a variable replaces a token of the same name
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


class TemplateReads:
    """What a chat template reads of a request: ``variables``, the names that ``source`` takes from outside, None where
    they cannot be found; whether ``tool_calls``; and ``tools`` as a variable, in the system message, or not at all.

    Raises what ``confined.Pool.run`` does.
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
    """What a template reads. Raises ``PackagingError`` where that cannot be found out within limits."""
    check_length(name, source)
    try:
        return TemplateReads(source)
    except (Exceeded, Ended, NoProcess) as error:
        raise PackagingError(f"chat_template {name!r}: it cannot be read: {error}") from None


def check_length(name: str, source: str) -> None:
    """Raises ``PackagingError`` for a template of more characters than any model's."""
    if len(source) > MAX_TEMPLATE:
        raise PackagingError(f"chat_template {name!r}: {len(source)} characters; at most {MAX_TEMPLATE} are allowed")


def _size(value: Any) -> int:
    """About as many bytes as ``value`` has as JSON; at most four times too few."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(entry) for key, entry in value.items()) + 2
    return sum(map(_size, value)) + 2 if isinstance(value, list | tuple) else 8
