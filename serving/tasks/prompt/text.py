"""The text side of a model: its tokenizer, chat templates and end-of-text ids.

It is thread-safe: encoding and decoding use a private copy of the fast tokenizer, which is not changed after it is
made. Templates are rendered in separate processes (``rendering``).
"""

from __future__ import annotations

import codecs
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ...interface.bundle import ADAPTER_TEMPLATE, Bundle, CrossEncoderSpec, EmbeddingSpec, ImageSpec
from ...interface.errors import InvalidField, PackagingError, RequestError, Unavailable, reason
from ...interface.request import ChatEnd
from ...interface.tool_format import ToolFormat
from ...model_files.eos import eos_ids
from ...model_files.token_bytes import BYTE_TOKEN, byte_table, plain_token
from ...sandbox import Refused
from ...tool_calls.detect import formats_of
from ...tool_calls.parser import special_stand_ins
from .adapter_tokenizer import difference, has_tokenizer, other_end
from .detokenize import CONTEXT_TOKENS, ByteDetokenizer, Detokenizer, WindowDetokenizer
from .pair_template import PairTemplate
from .rendering import Renderer, TemplateReads, read_template
from .special_token_injection import InjectionGuard, unmarked
from .template_trial import DEFAULT_TEMPLATE, Needs, attempts, check_template, needs_of, succeeds
from .tokenizer_check import check_fast, check_tokenizer

CHUNK_CHARACTERS = 65536  # characters tokenised at a time to find out whether a text can fit
SHORT_TEXT_SIZE = (
    2048  # characters or tokens; fewer take less time than releasing the interpreter lock and taking it again
)
TEXTS_PER_BATCH = 64  # texts tokenised at a time, before one of them is found too long
CHARACTERS_PER_TOKEN = 16  # characters read of a text per token that it may have; no language's words need so many
NUM_FREQUENT_IDS = 1000  # ids below are those of bytes and frequent words in many tokenizers
ADAPTER_PREFIX = "adapter:"  # of the name of an adapter's own template; names of other templates have no colon


class Reading(NamedTuple):
    """A format of calls and reasoning, and the stand-ins of the special tokens that its parser looks for.

    A stand-in is the character that replaces such a token in the text that the parser gets: ``stand_ins`` by the
    token's text, ``by_id`` by its id.
    """

    format: ToolFormat
    stand_ins: dict[str, str]
    by_id: dict[int, str]


class TextModel:
    """The tokenizer and the chat templates of one model.

    ``templates`` are Jinja sources by name; "default" is used if a request names none.
    """

    def __init__(self, bundle: Bundle, trust_remote_code: bool = False) -> None:
        self.hf: Any = _load_tokenizer(bundle.tokenizer_dir, trust_remote_code)
        self.backend = Tokenizer.from_str(self.hf.backend_tokenizer.to_str())
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = False
        added = self.hf.added_tokens_decoder
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._tables = byte_table(self.backend, self._special_ids)
        self.templates = _templates(bundle, self.hf)
        self.embedding: EmbeddingSpec | None = bundle.embedding
        self.cross_encoder: CrossEncoderSpec | None = bundle.cross_encoder
        self.eos_token_ids = eos_ids(bundle.model_dir, self.hf)
        self.vocab_size = len(self.hf)
        self._bos: str | None = self.hf.bos_token
        # copying a tokenizer takes a tenth of a second, which no request should wait for
        self._plain = self._copy()
        self._plain.encode_special_tokens = True
        self.guards: dict[str, InjectionGuard] = {}
        self._reads: dict[str, TemplateReads] = {}
        self._formats: dict[str, ToolFormat] = {}
        self._read_templates(self.templates, bundle.tool_formats)
        ends = {*self.eos_token_ids, *self.hf.all_special_ids}
        self.special_tokens = {
            token.content: token_id for token_id, token in added.items() if token.special or token_id in ends
        }
        self._readings: dict[str, Reading] = {}
        self._takes_system: dict[str, bool] = {}
        self.images: ImageSpec | None = bundle.images
        self._renderers = {parts: Renderer(self.hf, parts=parts) for parts in (False, True)}
        self._needs: dict[str, Needs] = {}
        if "score" in bundle.tasks:
            self.pairs  # noqa: B018 - fails now, not at the first request
        self._spare_embedders = [self._copy()] if "embeddings" in bundle.tasks else []
        self._embedders: dict[int, Tokenizer] = {}

    # -- to tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a raw text. A text that already begins with the BOS token gets no second one."""
        if add_special_tokens and self._bos and text.startswith(self._bos):
            add_special_tokens = not self._prepends_bos()
        return tuple(_encoding(self.backend, text, add_special_tokens).ids)

    def encode_embeddings(self, texts: Sequence[str], limit: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield ``(ids, cut)`` for each text: ids with special tokens, at most ``limit``, the text's end cut off."""
        embedder = self._embedder(limit)
        for start in range(0, len(texts), TEXTS_PER_BATCH):
            for encoding in _encodings(embedder, texts[start : start + TEXTS_PER_BATCH], True):
                ids = tuple(encoding.ids)
                yield ids, len(ids) == limit and bool(encoding.overflowing)

    def encode_input(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text to be embedded, with the model's special tokens and without truncation."""
        return tuple(_encoding(self.backend, text, True).ids)

    def encode_plain(self, texts: Sequence[str], limit: int) -> list[tuple[int, ...]]:
        """Return the token ids of each text without special tokens.

        Of a text with more than ``limit`` tokens only a beginning may be encoded, which also has more than ``limit``.
        """
        found: list[tuple[int, ...]] = []
        for start in range(0, len(texts), TEXTS_PER_BATCH):
            group = texts[start : start + TEXTS_PER_BATCH]
            beginnings = [text[: CHARACTERS_PER_TOKEN * limit] for text in group]
            for text, encoding in zip(group, _encodings(self.backend, beginnings, False), strict=True):
                ids = tuple(encoding.ids)
                if len(text) > CHARACTERS_PER_TOKEN * limit and len(ids) <= limit:
                    ids = tuple(_encoding(self.backend, text, False).ids)
                found.append(ids)
        return found

    def shortened(self, token_ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
        """Return ``token_ids``, of a text with its special tokens, with the text's end cut so that ``limit`` remain."""
        tail = self._tail
        kept = limit - len(tail)
        return (
            token_ids[:kept] + tail
            if kept > 0 and token_ids[len(token_ids) - len(tail) :] == tail
            else token_ids[:limit]
        )

    @functools.cached_property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before a text, and those after it."""
        plain = self.backend.encode("a", add_special_tokens=False)
        whole = self.backend.post_process(plain)
        first = whole.sequence_ids.index(0)
        return tuple(whole.ids[:first]), tuple(whole.ids[first + len(plain.ids) :])

    @property
    def _tail(self) -> tuple[int, ...]:
        return self._frame[1]

    def is_own_input(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether ``token_ids`` are surely of this tokenizer: a text in its special tokens.

        Ids of another tokenizer do not begin and end with them. One token on one side is enough unless its id is low,
        like those of bytes and frequent words of others. Without special tokens nothing is sure: any ids are a text.
        """
        lead, tail = self._frame
        sure = bool(lead and tail) or any(token_id >= NUM_FREQUENT_IDS for token_id in (*lead, *tail))
        framed = token_ids[: len(lead)] == lead and token_ids[len(token_ids) - len(tail) :] == tail
        return sure and framed and len(token_ids) >= len(lead) + len(tail)

    @property
    def frame(self) -> str:
        """The model's special tokens around a text, for errors: ``[CLS] … [SEP]``; "" if there are none."""
        lead, tail = (" ".join(self.token_names(part)) for part in self._frame)
        return f"{lead} … {tail}".strip() if lead or tail else ""

    @functools.cached_property
    def pairs(self) -> PairTemplate:
        """How two texts are joined into a pair. Raises ``PackagingError``."""
        return PairTemplate(self.backend, typed="token_type_ids" in self.hf.model_input_names)

    def _embedder(self, limit: int) -> Tokenizer:
        found = self._embedders.get(limit)
        if found is None:
            found = self._spare_embedders.pop() if self._spare_embedders else self._copy()
            found.enable_truncation(limit)
            self._embedders[limit] = found
        return found

    def _copy(self) -> Tokenizer:
        return Tokenizer.from_str(self.backend.to_str())

    def surely_over(self, text: str, limit: int) -> int | None:
        """Return a number above ``limit`` if ``text`` surely has more tokens than that; None if only encoding can tell.

        Encodes only about ``limit`` tokens, however long the text is: it encodes one stretch after another until their
        sum is clearly above the limit. A cut between two stretches adds a few tokens at most, which the margin covers.
        """
        if len(text) <= max(CHUNK_CHARACTERS, 4 * limit):
            return None
        count, margin = 0, limit // 4 + 64
        for start in range(0, len(text), CHUNK_CHARACTERS):
            stretch = text[start : start + CHUNK_CHARACTERS]
            count += len(_encoding(self.backend, stretch, False))
            if count > limit + margin:
                return limit + 1
        return None

    def tail(self, text: str, limit: int) -> str:
        """Return an end of ``text`` with at least ``limit`` tokens, without encoding the whole text if possible."""
        size = max(CHUNK_CHARACTERS, 4 * limit)
        while size < len(text):
            end = text[-size:]
            if len(_encoding(self.backend, end, False)) > limit + 16:
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
        """Return the token ids of a conversation, or only a count above ``limit`` if it surely does not fit.

        ``messages`` are in the form that templates read, and are not changed. ``context`` is the maximum number of
        tokens of a prompt; it bounds how much text a template may write.

        The template's text is tokenised exactly once and nothing is added. Special tokens that callers write in
        messages are encoded as ordinary text. Raises ``InvalidField`` if the template refuses the messages,
        ``RequestError`` if it takes too much time or memory.
        """
        source = self.template(template)
        given = list(messages)
        kwargs = dict(variables or {})
        self._check_needs(given, source, kwargs, end)
        guard = self.guards[source]
        if not guard.found_in([given, kwargs]):
            rendered = self._render(given, source, kwargs, context, end)
            over = None if limit is None else self.surely_over(rendered, limit)
            return tuple(_encoding(self.backend, rendered, False).ids) if over is None else over
        rendered = self._render(guard.mark(given), source, guard.mark(kwargs), context, end)
        over = None if limit is None else self.surely_over(unmarked(rendered), limit)
        return guard.encode(rendered) if over is None else over

    def template(self, name: str | None) -> str:
        """Return the source of the template called ``name``; a caller can never pass a template's source itself.

        Raises ``InvalidField`` if the model has no template of that name.
        """
        found = self.templates.get(name or DEFAULT_TEMPLATE)
        if found is None and name is None:
            raise InvalidField("messages", "a chat", "a prompt: this model has no chat template")
        if found is None:
            raise InvalidField("chat_template", name, "one of " + ", ".join(sorted(self.templates)))
        return found

    def has_template(self, name: str | None) -> bool:
        """Return whether the model has a template of this name, or a default one if ``name`` is None."""
        return (name or DEFAULT_TEMPLATE) in self.templates

    def template_of_adapter(self, adapter: str) -> str | None:
        """Return the name of the template that an adapter has of its own; None if it uses the model's."""
        name = ADAPTER_PREFIX + adapter
        return name if name in self.templates else None

    def with_adapters(self, templates: Mapping[str, str]) -> TextModel:
        """Return this model with the templates of further adapters, by the adapter's name.

        It shares the tokenizer, and keeps what it finds out about the templates for itself.
        """
        found = copy.copy(self)
        new = {ADAPTER_PREFIX + name: source for name, source in templates.items()}
        found.templates = self.templates | new
        found.guards, found._reads, found._formats = dict(self.guards), dict(self._reads), dict(self._formats)
        found._readings, found._takes_system, found._needs = {}, {}, {}
        found._read_templates({name: source for name, source in new.items() if source not in self.guards}, {})
        return found

    def check_adapter(self, name: str, template: str | None, tokenizer_dir: str | Path) -> str | None:
        """Check an adapter's own template, and the tokenizer that may be in ``tokenizer_dir``, for use with this model.

        Return the difference if the adapter ends its texts otherwise. Raises ``PackagingError``.
        """
        if template is not None:
            check_template(ADAPTER_PREFIX + name, template, self.hf, parts=self.images is not None)
        if not has_tokenizer(Path(tokenizer_dir)):
            return None
        beside = _load_tokenizer(str(tokenizer_dir), trust_remote_code=False)
        if (found := difference(beside, self.hf)) is not None:
            raise PackagingError(f"its tokenizer differs from the model's: {found}")
        return other_end(beside, self.hf)

    def reads(self, template: str | None) -> TemplateReads:
        """Return what a template reads. Raises the same errors as ``template``."""
        return self._reads[self.template(template)]

    def tool_format(self, template: str | None) -> ToolFormat:
        """Return how a model writes calls and reasoning with this template. Raises the same errors as ``template``."""
        return self._formats[self.template(template)]

    def reading(self, template: str | None) -> Reading:
        """Return how a reply to this template's prompts is parsed. Raises the same errors as ``template``."""
        source = self.template(template)
        found = self._readings.get(source)
        if found is None:
            format = self._formats[source]
            stand_ins = special_stand_ins(self.special_tokens, format)
            by_id = {self.special_tokens[token]: char for token, char in stand_ins.items()}
            found = self._readings[source] = Reading(format, stand_ins, by_id)
        return found

    def takes_system(self, template: str | None) -> bool:
        """Return whether a template writes out a system message.

        Raises the same errors as ``template``, and ``Overloaded``.
        """
        source = self.template(template)
        found = self._takes_system.get(source)
        if found is None:
            turns = [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "USER"}]
            try:
                found = "SYSTEM" in self._rendered(turns, source, {})
            except (RequestError, Unavailable):
                raise
            except Exception:  # a template may refuse a role with any error of Jinja or Python
                found = False
            self._takes_system[source] = found
        return found

    def _read_templates(self, templates: Mapping[str, str], formats: Mapping[str, ToolFormat]) -> None:
        """Read each of ``templates`` once; its format is the one packaged with the model, or else the detected one."""
        detected = formats_of(templates, self.hf)
        for name, source in templates.items():
            self.guards[source] = InjectionGuard(self.hf, self.backend, self._plain, source)
            self._reads[source] = read_template(name, source)
            self._formats[source] = formats.get(name) or detected[name]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str,
        kwargs: dict[str, Any],
        context: int | None,
        end: ChatEnd,
    ) -> str:
        try:
            return self._rendered(messages, source, kwargs, context, end)
        except (RequestError, Unavailable):
            raise
        except Exception as error:  # a template may refuse messages with any error of Jinja or Python
            roles = [message["role"] for message in messages[:16]]
            why = error.reason if isinstance(error, Refused) else f"{type(error).__name__}: {str(error)[:200]}"
            raise InvalidField("messages", roles, f"what the model's chat template accepts: {why}") from None

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str,
        kwargs: Mapping[str, Any],
        context: int | None = None,
        end: ChatEnd = "generation_prompt",
    ) -> str:
        parts = self.images is not None or self._needed(source).parts
        return self._renderers[parts].render(messages, source, kwargs, context, end)

    def _needed(self, source: str) -> Needs:
        """Return what a template needs of a request. Raises ``RequestError`` and ``Overloaded``."""
        found = self._needs.get(source)
        if found is None:
            found = self._needs[source] = self._tried(source)
        return found

    def _tried(self, source: str) -> Needs:
        def text(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, parts: bool) -> str:
            return self._renderers[parts].render(messages, source, variables, None)

        parts, named = self.images is not None, source != self.templates.get(DEFAULT_TEMPLATE)
        for attempt in attempts(source, self._reads[source], parts=parts, named=named):
            try:
                if succeeds(text, attempt):
                    return needs_of(text, attempt)
            except (RequestError, Unavailable):
                raise
            except Exception:  # a template may refuse messages with any error of Jinja or Python
                continue
        return Needs()

    def _check_needs(
        self, messages: Sequence[Mapping[str, Any]], source: str, kwargs: Mapping[str, Any], end: ChatEnd
    ) -> None:
        """Raise ``InvalidField`` for a chat that lacks what its template needs."""
        needs = self._needed(source)
        for name in needs.variables:
            if name not in kwargs:
                raise InvalidField(
                    f"chat_template_kwargs.{name}", None, "a value: this model's chat template needs this variable"
                )
        turns = [message["role"] for message in messages if message["role"] != "system"]
        if needs.one_turn and len(turns) > 1 and not (end == "open" and turns[1:] == ["assistant"]):
            allowed = "one message of the user: this model's chat template takes no further turns"
            raise InvalidField("messages", turns[:16], allowed)

    def _prepends_bos(self) -> bool:
        ids = self.backend.encode("").ids
        return bool(ids) and ids[0] == self.hf.bos_token_id

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """The token that the tokenizer puts before every raw text (BOS); often there is none."""
        return (self.hf.bos_token_id,) if self._prepends_bos() else ()

    # -- to text

    def detokenizer(
        self, skip_special_tokens: bool = True, *, keeps_space: bool = False, before: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a new detokenizer for one sequence.

        ``before`` are the tokens of the prompt if the text continues it. ``keeps_space`` keeps a space at the beginning
        of the text, as grammars expect; otherwise decoders of SentencePiece's kind remove it where nothing precedes.
        """
        if self._tables is not None:
            return ByteDetokenizer(self._tables[1 if skip_special_tokens else 0], before)
        if keeps_space:
            return WindowDetokenizer(self.backend, skip_special_tokens, self._some_text)
        context = self._context(before, skip_special_tokens)
        return WindowDetokenizer(self.backend, skip_special_tokens, context, self._incomplete(context))

    def _context(self, before: Sequence[int], skip_special_tokens: bool) -> Sequence[int]:
        """Return the end of ``before`` after which tokens are decoded as after the whole.

        It has a character other than a space, if the whole has one, and begins with a whole character.
        """
        start = len(before)
        while start > 0:
            start = max(0, 2 * start - len(before) - CONTEXT_TOKENS)  # twice as many
            while start > 0 and 0x80 <= self._fallback_byte(before[start]) < 0xC0:
                start -= 1
            if self.decode(before[start:], skip_special_tokens).strip():
                break
        return before[start:]

    def _incomplete(self, token_ids: Sequence[int]) -> int:
        """Return how many byte tokens at the end of ``token_ids`` are the beginning of a character."""
        count = 0
        while count < min(3, len(token_ids)) and self._fallback_byte(token_ids[-1 - count]) >= 0x80:
            count += 1
        if not count:
            return 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(map(self._fallback_byte, token_ids[-count:])))
        return len(decoder.getstate()[0])

    def _fallback_byte(self, token_id: int) -> int:
        """Return the byte for which a token of byte fallback (``<0xE2>``) stands; -1 if it is another token."""
        named = BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "") if self._has_byte_tokens else None
        return -1 if named is None else int(named[1], 16)

    @functools.cached_property
    def _has_byte_tokens(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and b"ByteFallback" in decoder.__getstate__()

    @functools.cached_property
    def _some_text(self) -> tuple[int, ...]:
        try:
            return (plain_token(self.backend, self._special_ids),)
        except ValueError:  # engines apply no grammar with such a tokenizer
            return ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``, with incomplete characters as U+FFFD."""
        ids = list(token_ids)
        if len(ids) > SHORT_TEXT_SIZE:  # the batch call releases the interpreter lock here too
            texts: list[str] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return texts[0]
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the tokenizer's vocabulary spells it (``Ġworld``); "" for an id without a token."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token within a text (of a special token, its name); b"" for an id without a token."""
        if self._tables is not None:
            table = self._tables[0]
            return table[token_id] if token_id < len(table) else b""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if (byte := self._fallback_byte(token_id)) >= 0:
            return bytes([byte])
        after = self._some_text
        return self.decode((*after, token_id), False).removeprefix(self.decode(after, False)).encode()


def _encoding(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Any:
    return _encodings(tokenizer, (text,), add_special_tokens)[0]


def _encodings(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
    """Return the encoding of each text, without offsets if the texts are long.

    ``encode`` holds the interpreter lock, for a second or more per megabyte; the batch call lets other threads run.
    """
    if sum(map(len, texts)) < SHORT_TEXT_SIZE:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    encodings: list[Any] = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return encodings


def _load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # imports torch, which code that only logs or finds a model does not need

    check_tokenizer(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the library raises bare Exceptions; a tokenizer's own code may raise anything
        raise PackagingError(f"tokenizer: it cannot be loaded: {reason(error)}") from error
    check_fast(tokenizer)
    return tokenizer


def _templates(bundle: Bundle, tokenizer: Any) -> dict[str, str]:
    """Return the bundle's templates, or those of the tokenizer's own files if it has none, and the adapters'."""
    files = {ADAPTER_PREFIX + name: Path(path, ADAPTER_TEMPLATE) for name, path in bundle.adapters.items()}
    try:
        of_adapters = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
        if bundle.chat_templates:
            found = {name: Path(path).read_text(encoding="utf-8") for name, path in bundle.chat_templates.items()}
            return found | of_adapters
    except (OSError, UnicodeDecodeError) as error:
        raise PackagingError(f"chat_template: it cannot be read: {reason(error)}") from None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        return dict(own) | of_adapters
    return ({DEFAULT_TEMPLATE: own} if own else {}) | of_adapters
