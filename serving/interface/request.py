"""A request before and after validation.

A dialect decodes a body to one of the ``Raw*`` types: typed, but with None for everything that the caller left out.
Everything below the dialect works with ``ValidRequest``: defaults resolved, template applied, tokenised, seed drawn,
limits checked. Only ``tasks.prepare`` builds one. All are frozen msgspec structs, so that the same type serves within a
process and over the wire to an engine process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import Struct

from .constraint import Constraint, Grammar
from .labels import Labels

Task: TypeAlias = Literal["chat", "completions", "embeddings", "score"]
POOLED: frozenset[Task] = frozenset({"embeddings", "score"})  # one vector or number per text; nothing is generated
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ErrorBehavior: TypeAlias = Literal["error", "truncate"]
LogitsOf: TypeAlias = Literal["context", "generation"]  # of the prompt's tokens, or of generated ones
UsageChunks: TypeAlias = Literal["none", "last", "all"]  # the chunks of a stream that have usage
Thinking: TypeAlias = Literal["enabled", "adaptive", "disabled"]  # the first two switch it on
ChatEnd: TypeAlias = Literal["generation_prompt", "open", "closed"]
MAX_CHOICES = 128  # per prompt
MAX_PROMPTS = 2048  # prompts or inputs per request
MAX_MESSAGES = 4096


EarlyStopping: TypeAlias = Literal["heuristic", "first", "never"]


class RawBeams(Struct, frozen=True, kw_only=True):
    """A caller's parameters of a beam search; see ``Beams``. ``field`` is the name of the width in the request."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    num_groups: int | None = None
    diversity_penalty: float | None = None
    field: str = "beam_width"


class Draft(Struct, frozen=True, kw_only=True):
    """The caller's prediction of the text, as ``text`` or as ``token_ids``.

    ``logits`` (float32, little endian, [tokens, V]) are given if the token ids were drawn from a distribution.
    ``field`` is the name of the prediction in the request.
    """

    text: str | None = None
    token_ids: tuple[int, ...] = ()
    logits: bytes | None = None
    field: str = "draft_input_ids"


class RawSampling(Struct, frozen=True, kw_only=True):
    """A caller's sampling parameters; None means the default of the endpoint's profile.

    With ``clip_max_tokens``, a request for more tokens than the context leaves or the endpoint allows gets as many as
    are possible instead of being refused. With ``exact_bounds``, a request is refused unless ``top_k`` is less than the
    vocabulary's size and the prompt leaves room for as many tokens as the endpoint ever generates (``maxIterTimes``).
    ``stop_sequences`` are runs of tokens that end the text, in addition to the strings in ``stop``. ``embedding_bias``
    (float32, little endian, [V]) is added to the logits. ``end_id`` ends the text instead of the model's own
    end-of-text ids. With ``penalize_prompt``, presence and frequency penalties count the prompt's tokens too, as in
    TensorRT-LLM.
    """

    max_tokens: int | None = None
    clip_max_tokens: bool | None = None
    exact_bounds: bool | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    error_behavior: ErrorBehavior | None = None
    timeout: float | None = None
    constraint: Constraint | None = None
    beams: RawBeams | None = None
    bad_words: tuple[str | tuple[int, ...], ...] | None = None
    stop_sequences: tuple[tuple[int, ...], ...] | None = None
    no_repeat_ngram_size: int | None = None
    embedding_bias: bytes | None = None
    end_id: int | None = None
    penalize_prompt: bool | None = None
    context_logits: bool | None = None
    generation_logits: bool | None = None
    draft: Draft | None = None


class LoraTask(Struct, frozen=True, kw_only=True):
    """An adapter that comes with the request (TensorRT-LLM's ``lora_task_id``, ``lora_weights``, ``lora_config``).

    The first request for an adapter has all three fields, later ones only ``task_id``. ``weights`` is float32, little
    endian, row-major, [rows, width]; each row is A [rank, in] then B [out, rank], padded with zeros. ``config`` has
    ``[module_id, layer, rank]`` or ``[module_id, layer, rank, is_dora]`` for each row of weights.
    """

    task_id: int
    weights: bytes | None = None
    config: tuple[tuple[int, ...], ...] | None = None


class PromptTable(Struct, frozen=True, kw_only=True):
    """Vectors of virtual tokens (p-tuning): token ids from the vocabulary's size on refer to its rows.

    ``data`` is float32, little endian, [num_tokens, hidden size].
    """

    data: bytes
    num_tokens: int


class Raw(Struct, frozen=True, kw_only=True):
    """The fields common to all tasks: the model's name, the adapter, whether to stream, and whose prefixes to share.

    ``echoed`` holds the parts of the request that the dialect's reply repeats, in the dialect's own form; nothing else
    reads it. ``lora_task`` replaces ``adapter``. With ``timings``, the reply says how long each step took; with
    ``return_trace``, it has the trace of the request. ``sent_as`` has names of fields as the caller sent them, by the
    names that errors use below the dialects, where these differ.
    """

    task: ClassVar[Task]

    model: str | None = None
    adapter: str | None = None
    stream: bool = False
    usage_chunks: UsageChunks = "none"
    labels: Labels | None = None
    cache_salt: str | None = None
    lora_task: LoraTask | None = None
    prompt_table: PromptTable | None = None
    timings: bool = False
    return_trace: bool = False
    echoed: bytes = b""
    sent_as: Mapping[str, str] = {}


class TextPart(Struct, frozen=True):
    """One text part of a message, as the caller divided it."""

    text: str


class MediaPart(Struct, frozen=True, kw_only=True):
    """An image, a video or a sound in a message, whose form has been checked.

    ``place`` is the path of a local file, or the host (and port, if given) of a URL; "" for data in the request itself.
    ``content`` is the path, the whole URL, or the data in base64 (checked, without its ``data:`` head). It may have
    ``max_bytes``. ``field`` is the path of the field that names it, ``part`` that of its part, ``name``
    the type of the part in the dialect.
    """

    kind: Literal["image", "video", "audio"]
    source: Literal["path", "url", "data"]
    place: str = ""
    content: str = ""
    max_bytes: int
    field: str
    part: str
    name: str = "image_url"


Part: TypeAlias = TextPart | MediaPart


class ToolCall(Struct, frozen=True, kw_only=True):
    """A function call by the assistant; ``arguments`` is the object parsed from the caller's JSON text."""

    id: str
    name: str
    arguments: dict[str, Any]


class Message(Struct, frozen=True, kw_only=True):
    """A turn of a chat, with the caller's parts: nothing is joined before the template (``tasks.conversation``)."""

    role: Role
    content: str | tuple[Part, ...] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """All text of the message: its parts joined with nothing between them."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content if isinstance(part, TextPart)])


class Tool(Struct, frozen=True, kw_only=True):
    """A function that the model may call.

    ``parameters`` is the JSON schema of its arguments object, None if it takes no arguments. ``strict`` constrains the
    arguments to the schema. A "custom" tool takes a text instead of an object, constrained to ``syntax`` if given.
    """

    name: str
    kind: Literal["function", "custom"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    syntax: Constraint | None = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The tools that may or must be called.

    ``names`` are the tools that may be called, () for all. ``named`` means that the caller named the one tool to call,
    as opposed to a subset that happens to have one entry; the reply then ends with "stop" (OpenAI's contract).
    """

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] = ()
    named: bool = False


class RawChat(Raw, frozen=True, kw_only=True):
    """A chat request; the dialect has checked the shape of ``messages``.

    ``end`` says how the prompt ends: with the beginning of the reply (transformers' ``add_generation_prompt``), with
    the last message left open for the model to continue (``continue_final_message``), or with the last message closed.
    ``thinking`` says whether the model should reason before it answers; None leaves that to its template.
    ``reasoning_effort`` says how much: "none" is not at all, other words are for templates that read them.
    """

    task: ClassVar[Task] = "chat"

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    end: ChatEnd = "generation_prompt"
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    sampling: RawSampling = RawSampling()


class RawCompletion(Raw, frozen=True, kw_only=True):
    """A completion request: ``prompts`` holds texts or token id lists; ``batched`` says whether a list was sent.

    ``chat_template`` is the template of its adapter, for prompts that are not raw.
    """

    task: ClassVar[Task] = "completions"

    prompts: tuple[str | tuple[int, ...], ...]
    batched: bool = False
    suffix: str | None = None
    echo: bool | None = None
    use_raw_prompt: bool | None = None
    chat_template: str | None = None
    sampling: RawSampling = RawSampling()


class RawEmbedding(Raw, frozen=True, kw_only=True):
    """An embeddings request: ``inputs`` holds texts or token id lists; ``batched`` says whether a list was sent."""

    task: ClassVar[Task] = "embeddings"

    inputs: tuple[str | tuple[int, ...], ...]
    batched: bool = False
    instruction: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    error_behavior: ErrorBehavior | None = None
    timeout: float | None = None


class RawScore(Raw, frozen=True, kw_only=True):
    """Texts to compare: one query with each of the documents, or equally many queries, each with its own document.

    ``names`` are the caller's names for the two, for errors. With ``ranked``, the documents are returned in order of
    their scores, ``top_n`` of them, with their texts if ``return_documents``. ``truncate`` is the most tokens kept of a
    text or a pair (-1: as many as the model takes); ``truncate_documents`` is that of each document. ``activate`` False
    returns a cross-encoder's raw numbers.
    """

    task: ClassVar[Task] = "score"

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    names: tuple[str, str] = ("query", "documents")
    ranked: bool = False
    top_n: int | None = None
    return_documents: bool | None = None
    truncate: int | None = None
    truncate_documents: int | None = None
    activate: bool | None = None
    timeout: float | None = None


RawRequest: TypeAlias = RawChat | RawCompletion | RawEmbedding | RawScore


class Beams(Struct, frozen=True, kw_only=True):
    """Beam search instead of sampling (``engine.beam_search``).

    ``width`` beams are followed at once, and the best ``n`` for a prompt are its choices, best first. The score of a
    beam is its sum of log probabilities divided by its length to the power of ``length_penalty``. ``early_stopping``
    "heuristic", "first" and "never" are transformers' False, True and "never". With ``num_groups`` (a divisor of the
    width) above 1, the search is a diverse beam search: a token's log probability in a group is lowered by
    ``diversity_penalty`` for each beam of an earlier group that has chosen the token in this step. ``field`` is the
    name of the width in the request, for errors.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"
    num_groups: int = 1
    diversity_penalty: float = 0.0
    field: str = "beam_width"


class DraftTokens(Struct, frozen=True, kw_only=True):
    """The caller's prediction of the text, used as drafts for speculative decoding.

    ``token_ids`` are computed together with the known tokens, and accepted as long as the same tokens are drawn. If
    there are ``logits`` (float32, little endian, [tokens, V]), the drafts were drawn from their softmax: as long as the
    text follows the drafts, its tokens are drawn by rejection sampling (``engine.rejection``).
    """

    token_ids: tuple[int, ...]
    logits: bytes | None = None


class Sampling(Struct, frozen=True, kw_only=True):
    """Resolved sampling parameters of a request; every field has its final value.

    ``max_tokens`` 0 generates nothing; the prompt is scored if ``prompt_logprobs`` asks for it. ``temperature`` 0 is
    greedy. ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 are off. ``logprobs`` None is off, 0 gives the sampled token
    alone, and k adds the k most probable ones. Log probabilities are of the distribution before temperature and
    truncation. ``stop_token_ids`` includes the model's end-of-text ids unless ``ignore_eos``. ``grammar`` constrains
    each text; None is no constraint. With ``beams``, nothing is sampled.

    ``bad_words`` are runs of tokens that never appear whole. ``stop_sequences`` are runs of two or more tokens that end
    the text (a single token is a stop token). No run of ``no_repeat_ngram_size`` tokens appears twice, counting the
    prompt; 0 is off. ``embedding_bias`` (float32, little endian, [V]) is added to the logits before anything else. With
    ``penalize_prompt``, presence and frequency penalties count the prompt's tokens too; the repetition penalty always
    does. ``context_logits`` and ``generation_logits`` ask for the rows of logits after each prompt token and before
    each generated token, as ``events.Logits``.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    beams: Beams | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    embedding_bias: bytes | None = None
    penalize_prompt: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    draft: DraftTokens | None = None


class RequestImage(Struct, frozen=True, kw_only=True):
    """An image of the prompt: ``data`` is RGB, a byte a channel, [height, width, 3] from the top left.

    ``num_tokens`` is how many tokens of the prompt stand for it (``Bundle.images``).
    """

    width: int
    height: int
    data: bytes
    num_tokens: int


class Sequence(Struct, frozen=True, kw_only=True):
    """One text to continue or to embed.

    ``resumed_token_ids`` are tokens that an earlier attempt already sampled and delivered. The engine feeds them after
    the prompt and continues at the next position, so the text is the same as without the interruption. They count
    towards ``max_tokens`` and penalties and are not sent again. ``seed`` (uint64) and the position determine every
    random draw of this sequence. ``context_logits_from`` is the first row of context logits to send; earlier rows were
    already delivered, or belong to the prompt's first sequence.
    """

    prompt_token_ids: tuple[int, ...]
    seed: int = 0
    resumed_token_ids: tuple[int, ...] = ()
    context_logits_from: int = 0


class ToolUse(Struct, frozen=True, kw_only=True):
    """The way to read tool calls in a reply.

    ``names`` are the tools that may be called, and ``custom`` those of them that take a text; ``choice`` is the
    caller's, and ``parallel`` says whether there may be several calls. ``types`` are the JSON types of each tool's
    arguments, for formats that do not write types (``tool_calls.argument_types``).
    """

    names: tuple[str, ...]
    custom: tuple[str, ...] = ()
    types: dict[str, dict[str, tuple[str, ...]]] = {}
    choice: ToolChoice = ToolChoice(mode="auto")
    parallel: bool = True


Activation: TypeAlias = Literal["identity", "sigmoid", "tanh"]


class ReplyForm(Struct, frozen=True, array_like=True):
    """The form of replies in an endpoint's settings (``dialect_settings``).

    Chunks of a stream have the ``full_text`` so far, Triton's details have ``times``, and its last event has an
    ``end_text``.
    """

    full_text: bool = False
    times: bool = False
    end_text: bool = False


class Scoring(Struct, frozen=True, kw_only=True):
    """The way in which the engine's answers become the reply to a request of task "score".

    The first ``num_queries`` sequences are queries and the others documents, whose vectors are compared (a single query
    with each document). If it is 0, each sequence is a pair, and its number, after ``activation``, is the score. With
    ``ranked``, the reply has the best ``top_n`` first, with ``documents`` if they are to be returned.
    """

    num_queries: int = 0
    activation: Activation = "identity"
    ranked: bool = False
    top_n: int | None = None
    documents: tuple[str, ...] | None = None


PROVISIONED, STANDARD, BACKGROUND = 0, 1, 2
"""The classes of requests: within a provisioned reserve, all others, and those of batches."""


class ValidRequest(Struct, frozen=True, kw_only=True):
    """The one request type below the dialects. Sequence ``i`` is choice ``i`` (prompts outer, n inner).

    Scheduling: ``deadline`` is in seconds of ``time.monotonic()``, which all processes of a host share; None is no
    deadline. A lower ``priority`` runs first. A ``provisioned`` request is within a provisioned reserve: it runs before
    all others, and its pace is kept whatever else runs. A ``background`` request (of a batch) gives way to all others.
    ``tenant`` is whose turn and whose place in the queue the
    request takes (a hash, never the name; "" without tenants). ``weight`` divides its key's tokens when turns are
    assigned (``engine.tenants``). Only requests with the same ``cache_salt`` reuse each other's prefixes
    (``tasks.cache_salt``); None shares with no other request.

    Input: ``truncated`` says that the prompt was cut for ``error_behavior: truncate``; ``clipped`` says that max_tokens
    was reduced to what the context leaves. ``sampling`` is None for embeddings. ``lora_task`` replaces ``adapter``; its
    id is valid only for this ``tenant``. Token ids of prompts from the vocabulary's size on are rows of
    ``prompt_table``, or tokens of ``images``, one image after another. For pairs of texts, ``second_from`` is the
    token of each sequence from which on token types are the second; () if each sequence is one text.

    Reply: with ``continues_prompt``, the text continues the prompt's own; without, it is a text of its own, such as a
    turn of a chat. ``stop`` strings are matched above the engine, on text. ``tools`` is None if none may be called.
    With ``begins_in_reasoning``, the prompt's template has opened the reasoning with which the reply continues.
    ``read_as`` is the chat template in whose format reasoning and calls are read from the reply; None if the reply is
    only text.
    ``index_by_prompt`` comes from the endpoint's profile, ``form`` from the endpoint. ``dimensions`` is for
    ``tasks.embed``: engines return whole vectors. ``scoring`` is for ``tasks.score``. With ``timings``, the engine
    measures its steps (``events.Timed``). With ``return_trace``, the reply has the trace of the request.
    ``model_version`` is that of the answering model, for dialects whose replies contain it.
    """

    request_id: str
    task: Task
    model: str
    sequences: tuple[Sequence, ...]
    sampling: Sampling | None = None
    adapter: str | None = None
    n: int = 1
    index_by_prompt: bool = False
    continues_prompt: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    tools: ToolUse | None = None
    begins_in_reasoning: bool = False
    read_as: str | None = None
    stream: bool = False
    usage_chunks: UsageChunks = "none"
    timings: bool = False
    return_trace: bool = False
    echo: tuple[str, ...] = ()
    suffix: str = ""
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    scoring: Scoring | None = None
    second_from: tuple[int, ...] = ()
    form: ReplyForm = ReplyForm()
    truncate_on_timeout: bool = False
    truncated: bool = False
    clipped: bool = False
    created: int = 0
    deadline: float | None = None
    priority: int = 0
    provisioned: bool = False
    background: bool = False
    cache_salt: str | None = None
    model_version: str = ""
    tenant: str = ""
    weight: int = 1
    lora_task: LoraTask | None = None
    prompt_table: PromptTable | None = None
    images: tuple[RequestImage, ...] = ()

    @property
    def service_class(self) -> int:
        """The class in which the engine runs it; a lower one has precedence."""
        if self.provisioned:
            return PROVISIONED
        return BACKGROUND if self.background else STANDARD

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens as billed: each prompt counts once, however many of the n choices came from it."""
        return sum(len(s.prompt_token_ids) for s in self.sequences[:: self.n])
