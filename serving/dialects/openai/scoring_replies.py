"""The objects of replies with scores: vLLM's list of scores, and the ranking of Jina's and Cohere's APIs."""

from __future__ import annotations

from ...interface.reply import Reply
from ...interface.request import ValidRequest
from .reply_types import PromptUsage, RankedResult, Ranking, ScoreList


def score_reply(request: ValidRequest, whole: Reply, model: str) -> Ranking | ScoreList:
    """Return the scores in the order of the texts or, for a ranking, the documents' indexes, best first."""
    usage: PromptUsage = {"prompt_tokens": whole.usage.prompt_tokens, "total_tokens": whole.usage.total_tokens}
    if request.scoring is not None and request.scoring.ranked:
        return {
            "id": "rerank-" + request.request_id,
            "model": model,
            "results": ranking(request, whole),
            "usage": usage,
        }
    return {
        "id": "score-" + request.request_id,
        "object": "list",
        "created": request.created,
        "model": model,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(whole.scores)],
        "usage": usage,
    }


def ranking(request: ValidRequest, whole: Reply) -> list[RankedResult]:
    """Return the results, best first; equal scores are in the order of the request."""
    assert request.scoring is not None
    scores, documents = whole.scores, request.scoring.documents
    found: list[RankedResult] = []
    for index in order(request, whole):
        entry: RankedResult = {"index": index, "relevance_score": scores[index]}
        if documents is not None:
            entry["document"] = {"text": documents[index]}
        found.append(entry)
    return found


def order(request: ValidRequest, whole: Reply) -> list[int]:
    """Return the indexes of a ranking's documents, best first, at most as many as were asked for."""
    assert request.scoring is not None
    scores = whole.scores
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: request.scoring.top_n]
