"""A request before and after validation.

``Raw*`` types are what a dialect decodes: typed, but with None wherever the caller said nothing.
``ValidRequest`` is what everything below the dialect sees: defaults resolved, template applied, tokenised,
seed drawn, limits checked. Only ``tasks.prepare`` builds one. All are frozen msgspec structs, so that one
type serves in a process and over the wire to an engine process.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import Struct

from .constraint import Constraint, Grammar

Task: TypeAlias = Literal["chat", "completions", "embeddings", "score"]
POOLED: frozenset[Task] = frozenset({"embeddings", "score"})  # a vector or a number a text: nothing is generated
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ErrorBehavior: TypeAlias = Literal["error", "truncate"]
LogitsOf: TypeAlias = Literal["context", "generation"]  # of a prompt's tokens, or of those generated
ChatEnd: TypeAlias = Literal["generation_prompt", "open", "closed"]
MAX_CHOICES = 128  # of one prompt
MAX_PROMPTS = 2048  # or inputs of one request
MAX_MESSAGES = 4096


EarlyStopping: TypeAlias = Literal["heuristic", "first", "never"]


class RawBeams(Struct, frozen=True, kw_only=True):
    """What a caller may say of a beam search; see ``Beams``. ``field`` is what the width is called there."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    num_groups: int | None = None
    diversity_penalty: float | None = None
    field: str = "beam_width"


class Draft(Struct, frozen=True, kw_only=True):
    """What the caller expects the text to be: as ``text``, or as ``token_ids``, with their ``logits`` (float32, little
    endian, [tokens, V]) where the drafts were drawn from a distribution. ``field`` is what it is called there."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()
    logits: bytes | None = None
    field: str = "draft_input_ids"


class RawSampling(Struct, frozen=True, kw_only=True):
    """What a caller may say of sampling; None means the default of the endpoint's profile.

    ``clip_max_tokens``: of more tokens than the context leaves or the endpoint allows, as many as it does, instead of a
    refusal. ``exact_bounds``: ``top_k`` is less than the vocabulary's size, and a prompt leaves room for as many tokens
    as the endpoint ever generates (``maxIterTimes``), or it is refused.
    ``stop_sequences`` are runs of tokens that end the text, beside the strings of ``stop``. ``embedding_bias`` is added
    to the logits: float32, little endian, [V]. ``end_id`` ends the text in place of the model's own end-of-text
    ids. ``penalize_prompt``: presence and frequency penalties count the prompt's tokens too, as TensorRT-LLM's do.
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

    Its first request has all three, later ones ``task_id`` alone. ``weights``: float32, little endian, row-major,
    [rows, width], each row A [rank, in] then B [out, rank], padded with zeros. ``config``: a row of
    ``[module_id, layer, rank]`` or ``[module_id, layer, rank, is_dora]`` for each row of weights.
    """

    task_id: int
    weights: bytes | None = None
    config: tuple[tuple[int, ...], ...] | None = None


class PromptTable(Struct, frozen=True, kw_only=True):
    """Vectors of virtual tokens (p-tuning): token ids from the vocabulary's size on are its rows.

    ``data``: float32, little endian, [num_tokens, hidden size].
    """

    data: bytes
    num_tokens: int


class Raw(Struct, frozen=True, kw_only=True):
    """What every task has: the name called, the adapter, whether to stream, whose prefixes it may share.

    ``echoed`` is what the dialect's reply repeats of the request, in a form of its own; nothing else reads it.
    ``lora_task`` takes the place of ``adapter``. ``timings``: the reply is to say how long each step took.
    """

    task: ClassVar[Task]

    model: str | None = None
    adapter: str | None = None
    stream: bool = False
    include_usage: bool = False
    user: str | None = None
    cache_salt: str | None = None
    lora_task: LoraTask | None = None
    prompt_table: PromptTable | None = None
    timings: bool = False
    echoed: bytes = b""


class TextPart(Struct, frozen=True):
    """A stretch of a message's text, as the caller parted it."""

    text: str


class MediaPart(Struct, frozen=True, kw_only=True):
    """An image, a video or a sound within a message, whose form has been checked.

    ``place``: the path of a local file, or the host of a URL and its port if it has one; "" for what the request
    brought itself. ``most`` bytes it may have. ``field`` is where it is named in the request, ``part`` its part.
    """

    kind: Literal["image", "video", "audio"]
    source: Literal["path", "url", "data"]
    place: str = ""
    most: int
    field: str
    part: str


Part: TypeAlias = TextPart | MediaPart


class ToolCall(Struct, frozen=True, kw_only=True):
    """A function that the assistant has called; ``arguments`` as the object that was in the caller's JSON text."""

    id: str
    name: str
    arguments: dict[str, Any]


class Message(Struct, frozen=True, kw_only=True):
    """A turn of a chat, as the caller parted it: nothing is joined before the template (``tasks.conversation``)."""

    role: Role
    content: str | tuple[Part, ...] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """All of its text, its parts joined with nothing between them."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content if isinstance(part, TextPart)])


class Tool(Struct, frozen=True, kw_only=True):
    """A function that the model may call.

    ``parameters`` is the JSON schema of the object of its arguments; None: it takes none. ``strict``: the arguments are
    held to it. A "custom" tool takes a text instead of an object, of the form ``syntax`` if there is one.
    """

    name: str
    kind: Literal["function", "custom"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    syntax: Constraint | None = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    """``names``: the tools that may be called, () for all. ``named``: the caller named the one to be called, as opposed
    to a subset that happens to have one; its reply then ends with "stop" (OpenAI's contract)."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] = ()
    named: bool = False


class RawChat(Raw, frozen=True, kw_only=True):
    """``messages`` are checked for shape by the dialect.

    ``end``: what the prompt ends in, the beginning of the reply (transformers' ``add_generation_prompt``), the last
    message left open for the model to go on with (``continue_final_message``), or the last message closed.
    ``thinking``: whether the model is to reason before it answers; None for its template's own way.
    """

    task: ClassVar[Task] = "chat"

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    end: ChatEnd = "generation_prompt"
    thinking: bool | None = None
    sampling: RawSampling = RawSampling()


class RawCompletion(Raw, frozen=True, kw_only=True):
    """``prompts`` holds texts or token id lists, one a prompt; ``batched`` is whether a list was sent."""

    task: ClassVar[Task] = "completions"

    prompts: tuple[str | tuple[int, ...], ...]
    batched: bool = False
    suffix: str | None = None
    echo: bool | None = None
    use_raw_prompt: bool | None = None
    sampling: RawSampling = RawSampling()


class RawEmbedding(Raw, frozen=True, kw_only=True):
    """``inputs`` holds texts or token id lists."""

    task: ClassVar[Task] = "embeddings"

    inputs: tuple[str | tuple[int, ...], ...]
    instruction: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    error_behavior: ErrorBehavior | None = None
    timeout: float | None = None


class RawScore(Raw, frozen=True, kw_only=True):
    """Texts to be compared: one query with each of the documents, or as many queries, each with its document.

    ``names``: what the caller calls the two, in errors. ``ranked``: the documents are wanted in order of their scores,
    ``top_n`` of them, themselves too where ``return_documents``. ``truncate`` is the most tokens that are kept of a
    text or a pair, -1 as many as the model takes; ``truncate_documents`` of each document. ``activate`` False leaves a
    cross-encoder's own numbers as they are.
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
    """Beam search instead of sampling: ``width`` texts are followed at once and the best ``n`` of a prompt are its
    choices, best first (``engine.beam_search``).

    A text's score is its sum of log probabilities over its length to the power of ``length_penalty``.
    ``early_stopping`` "heuristic", "first" and "never" are transformers' False, True and "never". More than one
    ``num_groups`` (a divisor of the width) is diverse beam search: a group's log probabilities are lowered by
    ``diversity_penalty`` for each earlier group's beam that has chosen the token in this step. ``field`` is what the
    width is called in the request, for errors.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"
    num_groups: int = 1
    diversity_penalty: float = 0.0
    field: str = "beam_width"


class DraftTokens(Struct, frozen=True, kw_only=True):
    """What the caller expects the text to be: ``token_ids`` are computed along with what is known, and those that are
    drawn there are taken. ``logits`` (float32, little endian, [tokens, V]): the drafts were drawn from the softmax of
    these, and while the text is what was drafted its tokens are drawn by rejection sampling (``engine.rejection``)."""

    token_ids: tuple[int, ...]
    logits: bytes | None = None


class Sampling(Struct, frozen=True, kw_only=True):
    """Resolved sampling parameters of a request; every field has its final value.

    ``max_tokens`` 0 generates nothing: the prompt is scored, where ``prompt_logprobs`` asks for it. ``temperature`` 0
    is greedy. ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 are off. ``logprobs`` None is off,
    0 the sampled token alone, k the k best beside it. ``stop_token_ids`` includes the model's end-of-text ids
    unless ``ignore_eos``. Log probabilities are of the distribution before temperature and truncation. ``grammar`` is
    what each text is held to, None for nothing. With ``beams`` nothing is drawn.

    ``bad_words`` are runs of tokens that never come whole; ``stop_sequences`` those of two tokens and more that end the
    text (one token is a stop token). No run of ``no_repeat_ngram_size`` tokens comes twice, the prompt's included; 0 is
    off. ``embedding_bias`` (float32, little endian, [V]) is added to the logits before all else. ``penalize_prompt``:
    presence and frequency penalties count the prompt's tokens too; the repetition penalty always does.
    ``context_logits`` and ``generation_logits``: the rows of logits after each token of the prompt and before each
    generated one come as ``events.Logits``.
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


class Sequence(Struct, frozen=True, kw_only=True):
    """One text to continue or to embed.

    ``resumed_token_ids`` are tokens that an earlier attempt already sampled and delivered: the engine feeds them
    after the prompt and goes on at the position after them, so the text is what it would have been. They count
    towards ``max_tokens`` and penalties and are not sent again. ``seed`` (uint64) with the position decides
    every random draw of this sequence. ``context_logits_from``: the first row of the context's logits that is wanted;
    those before it were delivered, or are those of the prompt's first sequence.
    """

    prompt_token_ids: tuple[int, ...]
    seed: int = 0
    resumed_token_ids: tuple[int, ...] = ()
    context_logits_from: int = 0


class ToolUse(Struct, frozen=True, kw_only=True):
    """How calls in a reply are read: the tools that may be called, by name (``custom`` are those that take a text),
    what the caller chose, and whether there may be several calls. ``types``: the JSON types of each tool's arguments,
    for formats that do not write them (``tool_calls.argument_types``)."""

    names: tuple[str, ...]
    custom: tuple[str, ...] = ()
    types: dict[str, dict[str, tuple[str, ...]]] = {}
    choice: ToolChoice = ToolChoice(mode="auto")
    parallel: bool = True


Activation: TypeAlias = Literal["identity", "sigmoid", "tanh"]


class ReplyForm(Struct, frozen=True, array_like=True):
    """What an endpoint's settings say of the form of replies (``dialect_settings``): a stream's chunks have the
    ``full_text`` so far, Triton's details have ``times``, and its last event an ``end_text``."""

    full_text: bool = False
    times: bool = False
    end_text: bool = False


class Scoring(Struct, frozen=True, kw_only=True):
    """What becomes of the engine's answers to a request of task "score".

    ``num_queries``: the first of the sequences are queries, the others documents, and vectors are compared, those of
    one query with each document's; 0: each sequence is a pair and its number the score, after ``activation``.
    ``ranked``: best first, ``top_n`` of them, with ``documents`` where they are to be returned.
    """

    num_queries: int = 0
    activation: Activation = "identity"
    ranked: bool = False
    top_n: int | None = None
    documents: tuple[str, ...] | None = None


class ValidRequest(Struct, frozen=True, kw_only=True):
    """The one request type below the dialects. Sequence ``i`` is choice ``i`` (prompts outer, n inner).

    ``deadline`` is seconds of ``time.monotonic()``, which all processes of a host share; None for none. ``priority``:
    lower runs first. ``provisioned``: within a provisioned reserve; it runs before all others and its pace is kept
    whatever else runs. ``stop`` strings are matched above the engine, on text. ``truncated`` says that the prompt was
    cut for ``error_behavior: truncate``, ``clipped`` that max_tokens is less than was asked for. ``cache_salt`` is
    whose prefixes the sequences may reuse, and who may reuse theirs: requests of the same salt (``tasks.cache_salt``);
    None shares with no other request. ``tenant`` is whose turn and whose place in the queue it takes (a hash, never the
    name; "" where there are no tenants), ``weight`` what its key's tokens are divided by when turns are given
    (``engine.tenants``). ``sampling`` is None for embeddings. ``tools`` is None where none may be called.
    ``begins_in_reasoning``: the prompt's template has opened the reasoning that the reply goes on with. ``read_as``:
    the chat template in whose format reasoning and calls are read out of the reply; None where it is text alone.
    ``index_by_prompt`` is the endpoint's profile's. ``dimensions`` is for ``tasks.embed``: engines give whole vectors.
    ``timings``: the engine measures its steps (``events.Timed``). ``form`` is the endpoint's. ``scoring`` is for
    ``tasks.score``. ``second_from``: for pairs of texts, from which token on each sequence has tokens of the second
    type; () where sequences are one text. ``model_version``: of the model that answers, for dialects whose replies
    say it. ``lora_task`` takes the place of ``adapter``; its id is one of ``tenant``'s alone. Token ids of prompts from
    the vocabulary's size on are rows of ``prompt_table``.
    """

    request_id: str
    task: Task
    model: str
    sequences: tuple[Sequence, ...]
    sampling: Sampling | None = None
    adapter: str | None = None
    n: int = 1
    index_by_prompt: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    tools: ToolUse | None = None
    begins_in_reasoning: bool = False
    read_as: str | None = None
    stream: bool = False
    include_usage: bool = False
    timings: bool = False
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
    cache_salt: str | None = None
    model_version: str = ""
    tenant: str = ""
    weight: int = 1
    lora_task: LoraTask | None = None
    prompt_table: PromptTable | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens as billed: each prompt once, however many of the n choices came from it."""
        return sum(len(s.prompt_token_ids) for s in self.sequences[:: self.n])
