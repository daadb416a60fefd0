"""The text side of a model: its tokenizer, chat templates and end-of-text ids.

Thread-safe: encoding and decoding go through a private copy of the fast tokenizer that nothing changes after it is
made. Templates are rendered in processes of their own (``rendering``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ..bundle import Bundle, CrossEncoderSpec, EmbeddingSpec
from ..confined import Refused
from ..eos import eos_ids
from ..errors import InvalidField, PackagingError, RequestError, Unavailable, reason
from ..request import ChatEnd
from ..token_bytes import byte_table, plain_token
from ..tool_calls.detect import formats_of
from ..tool_calls.formats import ToolFormat
from ..tool_calls.parser import special_stand_ins
from .detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .pair_template import PairTemplate
from .rendering import Renderer, TemplateReads, read_template
from .special_token_injection import InjectionGuard, unmarked
from .tokenizer_check import check_tokenizer

CHUNK = 65536  # characters tokenised at a time while only asking whether a text can fit
SHORT = 2048  # characters or tokens, which take less time than to hand the lock to and fro
GROUP = 64  # texts tokenised at a time, before one of them is found too long
BEGINNING = 16  # characters of a text for each token that it may have: more than any language's words need
DEFAULT_TEMPLATE = "default"


class Reading(NamedTuple):
    """A format of calls and reasoning, and the special tokens that its readers look for: what stands for each in the
    text that they get, by the token's text and by its id."""

    format: ToolFormat
    stand_ins: dict[str, str]
    by_id: dict[int, str]


class TextModel:
    """``chat_templates``: Jinja sources by name, as in the bundle's files; "default" is used unless named."""

    def __init__(self, bundle: Bundle, trust_remote_code: bool = False) -> None:
        self._hf: Any = _load_tokenizer(bundle.tokenizer_dir, trust_remote_code)
        self._backend = Tokenizer.from_str(self._hf.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = False
        added = self._hf.added_tokens_decoder
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._tables = byte_table(self._backend, self._special_ids)
        self.templates = _templates(bundle, self._hf)
        self.embedding: EmbeddingSpec | None = bundle.embedding
        self.cross_encoder: CrossEncoderSpec | None = bundle.cross_encoder
        self.eos_token_ids = eos_ids(bundle.model_dir, self._hf)
        self.vocab_size = len(self._hf)
        self._bos: str | None = self._hf.bos_token
        # copying a tokenizer takes a tenth of a second, which no request should wait for
        plain = self._copy()
        plain.encode_special_tokens = True
        sources = set(self.templates.values())
        self._guards = {source: InjectionGuard(self._hf, self._backend, plain, source) for source in sources}
        self._reads = {source: read_template(name, source) for name, source in self.templates.items()}
        ends = {*self.eos_token_ids, *self._hf.all_special_ids}
        self.special_tokens = {
            token.content: token_id for token_id, token in added.items() if token.special or token_id in ends
        }
        self._formats = self._tool_formats(bundle)
        self._readings: dict[str, Reading] = {}
        self._takes_system: dict[str, bool] = {}
        self._renderer = Renderer(self._hf)
        if "score" in bundle.tasks:
            self.pairs  # noqa: B018 - found out now, not by the first request
        self._spare_embedders = [self._copy()] if "embeddings" in bundle.tasks else []
        self._embedders: dict[int, Tokenizer] = {}

    # -- to tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a raw text. A text that already begins with the BOS token's text gets no second one."""
        if add_special_tokens and self._bos and text.startswith(self._bos):
            add_special_tokens = not self._prepends_bos()
        return tuple(_encoding(self._backend, text, add_special_tokens).ids)

    def encode_embeddings(self, texts: Sequence[str], limit: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        """``(ids, cut)`` of each: ids with the model's special tokens, cut to ``limit`` tokens from the text's end."""
        embedder = self._embedder(limit)
        for start in range(0, len(texts), GROUP):
            for encoding in _encodings(embedder, texts[start : start + GROUP], True):
                ids = tuple(encoding.ids)
                yield ids, len(ids) == limit and bool(encoding.overflowing)

    def encode_input(self, text: str) -> tuple[int, ...]:
        """Token ids of a text to be embedded, with the model's special tokens and nothing cut."""
        return tuple(_encoding(self._backend, text, True).ids)

    def encode_plain(self, texts: Sequence[str], limit: int) -> list[tuple[int, ...]]:
        """Token ids of each text without special tokens; of one with more than ``limit``, more than that at least."""
        found: list[tuple[int, ...]] = []
        for start in range(0, len(texts), GROUP):
            group = texts[start : start + GROUP]
            beginnings = [text[: BEGINNING * limit] for text in group]
            for text, encoding in zip(group, _encodings(self._backend, beginnings, False), strict=True):
                ids = tuple(encoding.ids)
                if len(text) > BEGINNING * limit and len(ids) <= limit:
                    ids = tuple(_encoding(self._backend, text, False).ids)
                found.append(ids)
        return found

    def shortened(self, token_ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """``token_ids`` of a text with its special tokens, cut at the text's end to ``limit`` tokens."""
        tail = self._tail
        kept = limit - len(tail)
        return (
            token_ids[:kept] + tail
            if kept > 0 and token_ids[len(token_ids) - len(tail) :] == tail
            else token_ids[:limit]
        )

    @functools.cached_property
    def _tail(self) -> tuple[int, ...]:
        """The special tokens behind a text."""
        plain = self._backend.encode("a", add_special_tokens=False)
        whole = self._backend.post_process(plain)
        owners = whole.sequence_ids
        return tuple(whole.ids[owners.index(0) + len(plain.ids) :])

    @functools.cached_property
    def pairs(self) -> PairTemplate:
        """How two texts are put together. Raises ``PackagingError``."""
        return PairTemplate(self._backend, typed="token_type_ids" in self._hf.model_input_names)

    def _embedder(self, limit: int) -> Tokenizer:
        found = self._embedders.get(limit)
        if found is None:
            found = self._spare_embedders.pop() if self._spare_embedders else self._copy()
            found.enable_truncation(limit)
            self._embedders[limit] = found
        return found

    def _copy(self) -> Tokenizer:
        return Tokenizer.from_str(self._backend.to_str())

    def surely_over(self, text: str, limit: int) -> int | None:
        """A number of tokens above ``limit`` that ``text`` surely has, or None where only encoding it can say.

        Costs about ``limit`` tokens, however long the text: stretches are encoded until they sum up to clearly more
        than the limit. A cut between two stretches can add tokens but a few, which the margin covers.
        """
        if len(text) <= max(CHUNK, 4 * limit):
            return None
        count, margin = 0, limit // 4 + 64
        for start in range(0, len(text), CHUNK):
            stretch = text[start : start + CHUNK]
            count += len(_encoding(self._backend, stretch, False))
            if count > limit + margin:
                return limit + 1
        return None

    def tail(self, text: str, limit: int) -> str:
        """An end of ``text`` with at least ``limit`` tokens, where that can be had without encoding all of it."""
        size = max(CHUNK, 4 * limit)
        while size < len(text):
            end = text[-size:]
            if len(_encoding(self._backend, end, False)) > limit + 16:
                return end
            size *= 2
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        limit: int | None = None,
        context: int | None = None,
        end: ChatEnd = "generation_prompt",
    ) -> tuple[int, ...] | int:
        """Token ids of a conversation, or only a count above ``limit`` where it surely does not fit.

        ``messages`` are in the form that templates read, and are not changed. ``context``: the most tokens a prompt may
        have, for what a template may write.

        The template's text is tokenised exactly once and nothing is added. Special tokens that callers write in
        messages are encoded as ordinary text. Raises ``InvalidField`` where the template refuses the messages,
        ``RequestError`` where it takes too much of time or memory.
        """
        source = self.template(template)
        given = list(messages)
        kwargs = dict(variables or {})
        guard = self._guards[source]
        if not guard.found_in([given, kwargs]):
            rendered = self._render(given, source, kwargs, context, end)
            over = None if limit is None else self.surely_over(rendered, limit)
            return tuple(_encoding(self._backend, rendered, False).ids) if over is None else over
        rendered = self._render(guard.mark(given), source, guard.mark(kwargs), context, end)
        over = None if limit is None else self.surely_over(unmarked(rendered), limit)
        return guard.encode(rendered) if over is None else over

    def template(self, name: str | None) -> str:
        """Raises ``InvalidField`` for a name the model does not have; a template's source itself is never taken."""
        found = self.templates.get(name or DEFAULT_TEMPLATE)
        if found is None and name is None:
            raise InvalidField("messages", "a chat", "a prompt: this model has no chat template")
        if found is None:
            raise InvalidField("chat_template", name, "one of " + ", ".join(sorted(self.templates)))
        return found

    def reads(self, template: str | None) -> TemplateReads:
        """What a template reads. Raises as ``template`` does."""
        return self._reads[self.template(template)]

    def tool_format(self, template: str | None) -> ToolFormat:
        """How calls and reasoning are written after a template. Raises as ``template`` does."""
        return self._formats[self.template(template)]

    def reading(self, template: str | None) -> Reading:
        """How a reply after a template is read. Raises as ``template`` does."""
        source = self.template(template)
        found = self._readings.get(source)
        if found is None:
            format = self._formats[source]
            stand_ins = special_stand_ins(self.special_tokens, format)
            by_id = {self.special_tokens[token]: char for token, char in stand_ins.items()}
            found = self._readings[source] = Reading(format, stand_ins, by_id)
        return found

    def takes_system(self, template: str | None) -> bool:
        """Whether a template writes a system message down. Raises as ``template`` does, ``Overloaded``."""
        source = self.template(template)
        found = self._takes_system.get(source)
        if found is None:
            turns = [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "USER"}]
            try:
                found = "SYSTEM" in self._renderer.render(turns, source, {}, None)
            except (RequestError, Unavailable):
                raise
            except Exception:  # templates refuse a role with any error of Jinja's or Python's
                found = False
            self._takes_system[source] = found
        return found

    def _tool_formats(self, bundle: Bundle) -> dict[str, ToolFormat]:
        """By the source of each template: what the model was packaged with, else as it is detected."""
        detected = formats_of(self.templates, self._hf)
        return {source: bundle.tool_formats.get(name) or detected[name] for name, source in self.templates.items()}

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str,
        kwargs: dict[str, Any],
        context: int | None,
        end: ChatEnd,
    ) -> str:
        try:
            return self._renderer.render(messages, source, kwargs, context, end)
        except (RequestError, Unavailable):
            raise
        except Exception as error:  # a template may raise anything of Jinja's or Python's on messages it dislikes
            roles = [message["role"] for message in messages[:16]]
            why = error.reason if isinstance(error, Refused) else f"{type(error).__name__}: {str(error)[:200]}"
            raise InvalidField("messages", roles, f"what the model's chat template accepts: {why}") from None

    def _prepends_bos(self) -> bool:
        ids = self._backend.encode("").ids
        return bool(ids) and ids[0] == self._hf.bos_token_id

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before every raw text (BOS), often nothing."""
        return (self._hf.bos_token_id,) if self._prepends_bos() else ()

    # -- to text

    def detokenizer(self, skip_special_tokens: bool = True, *, keeps_space: bool = False) -> Detokenizer:
        """A fresh state for one sequence. ``keeps_space``: its text is every token's, as grammars count it; else
        decoders of SentencePiece's kind take away a space at its beginning."""
        if self._tables is not None:
            return ByteDetokenizer(self._tables[1 if skip_special_tokens else 0])
        return WindowDetokenizer(self._backend, skip_special_tokens, self._some_text() if keeps_space else ())

    def _some_text(self) -> tuple[int, ...]:
        try:
            return (plain_token(self._backend, self._special_ids),)
        except ValueError:  # engines hold no text of such a tokenizer to a grammar
            return ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all of ``token_ids``, incomplete characters as U+FFFD."""
        ids = list(token_ids)
        if len(ids) > SHORT:  # the batch's form lets others run here too
            texts: list[str] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return texts[0]
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the tokenizer's own vocabulary has it (``Ġworld``); "" for an id without a token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself (special tokens: their name); b"" for an id without a token."""
        if self._tables is not None:
            table = self._tables[0]
            return table[token_id] if token_id < len(table) else b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode() if token_id not in self._special_ids else token.encode()


def _encoding(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Any:
    return _encodings(tokenizer, (text,), add_special_tokens)[0]


def _encodings(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
    """The encoding of each text, without offsets where they are long.

    ``encode`` holds the interpreter lock, for a second or more a megabyte; the batch's form lets others run.
    """
    if sum(map(len, texts)) < SHORT:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    encodings: list[Any] = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return encodings


def _load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # which imports torch: not for who only logs, finds or names a model

    check_tokenizer(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions; a tokenizer's own code may raise anything
        raise PackagingError(f"tokenizer: it cannot be loaded: {reason(error)}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise PackagingError(f"{type(tokenizer).__name__} has no fast form (tokenizer.json); convert it and log again")
    return tokenizer


def _templates(bundle: Bundle, tokenizer: Any) -> dict[str, str]:
    """The bundle's templates; where it has none, those the tokenizer's own files hold."""
    try:
        if bundle.chat_templates:
            return {name: Path(path).read_text(encoding="utf-8") for name, path in bundle.chat_templates.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise PackagingError(f"chat_template: it cannot be read: {reason(error)}") from None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        return dict(own)
    return {DEFAULT_TEMPLATE: own} if own else {}
