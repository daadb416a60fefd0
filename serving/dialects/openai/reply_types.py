"""The objects of OpenAI's replies, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from ...interface.request import Task
from ..base import Exchange

Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class AlternativeToken(TypedDict):
    """A token, its log probability and its bytes."""

    token: str
    logprob: float | None
    bytes: list[int]


class ScoredToken(AlternativeToken):
    """A token of the text, with the likeliest tokens at its place."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobs(TypedDict):
    content: list[ScoredToken]
    refusal: None


class CalledFunction(TypedDict):
    """A function and its arguments, as JSON in a string."""

    name: str
    arguments: str


class FunctionCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustomTool(TypedDict):
    """A custom tool and its input."""

    name: str
    input: str


class CustomCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class ChatMessage(TypedDict):
    """A message of the assistant, which a client may send back. ``content`` is null beside calls without a text."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCall | CustomCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """The parts of the completion tokens that apply. The tokens of drafts are not billed."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]
    draft_tokens: NotRequired[int]
    accepted_draft_tokens: NotRequired[int]


class CompletionUsage(TypedDict):
    """The counted tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class PromptUsage(TypedDict):
    """The counted tokens of a request that generates none."""

    prompt_tokens: int
    total_tokens: int


class ChatCompletion(TypedDict):
    """The reply to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(TypedDict):
    """Parallel lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class TextCompletion(TypedDict):
    """The reply to one or more prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage


class Embedding(TypedDict):
    """A vector: a list of numbers or, with ``encoding_format`` ``base64``, little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """The vectors of the inputs, in their order. Databricks' and MLflow's routes give them an id."""

    id: NotRequired[str]
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The scores of the pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


class RankedDocument(TypedDict):
    text: str


class RankedResult(TypedDict):
    """A document by its place in the request; its text if the request asks for it."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class Ranking(TypedDict):
    """The documents, best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PromptUsage


class CalledFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CalledCustomToolDelta(TypedDict):
    name: NotRequired[str]
    input: str


class FunctionCallDelta(TypedDict):
    """A piece of a call: the first one of a call has its id and name, and clients join the arguments of one index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class CustomCallDelta(TypedDict):
    """A piece of a call of a custom tool."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["custom"]]
    custom: CalledCustomToolDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCallDelta | CustomCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(TypedDict):
    """The data of an event of a streamed chat. ``usage`` is there if the request or the route asks for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(TypedDict):
    """The data of an event of streamed completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class ModelVersionServed(TypedDict):
    """A version of a model that answers for an endpoint. Its name in the registry is shown to those who manage."""

    name: str
    model_version: NotRequired[str]
    content_hash: NotRequired[str]
    model_name: NotRequired[str]


class ModelCard(TypedDict):
    """An endpoint, or one of its adapters, which has its endpoint as ``parent``."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: NotRequired[str]
    root: str
    max_model_len: int
    served_models: list[ModelVersionServed]
    sampling_defaults: NotRequired[dict[str, Any]]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """The tokens of a prompt; ``token_strs`` is null unless the request asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


ENDS = "The stream ends with `data: [DONE]`."
_HELLO = [{"role": "user", "content": "Say hello."}]
CHAT_EXAMPLE: dict[str, Any] = {"model": "assistant", "messages": _HELLO, "max_tokens": 16}
EMBEDDING_EXAMPLE: dict[str, Any] = {"model": "assistant", "input": ["a cat", "a dog"]}
CHAT = Exchange(example=CHAT_EXAMPLE, whole=ChatCompletion, event=ChatChunk, ends=ENDS)
COMPLETIONS = Exchange(
    example={"model": "assistant", "prompt": "Once upon a time", "max_tokens": 16},
    whole=TextCompletion,
    event=TextChunk,
    ends=ENDS,
)
EMBEDDINGS = Exchange(example=EMBEDDING_EXAMPLE, whole=EmbeddingList)
SCORES = Exchange(
    example={"model": "reranker", "text_1": "What is a cat?", "text_2": ["An animal.", "A number."]}, whole=ScoreList
)
RANKING = Exchange(
    example={"model": "reranker", "query": "What is a cat?", "documents": ["An animal.", "A number."]}, whole=Ranking
)
EITHER_SCORES = Exchange(example=RANKING.example, whole=Ranking | ScoreList)  # by the names of the body's two sides
EXCHANGES: Mapping[Task, Exchange] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "embeddings": EMBEDDINGS,
    "score": SCORES,
}
