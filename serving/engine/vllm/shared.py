"""The tables that the engine shares with the logits processor that vLLM makes in its process. By a sequence's key."""

from __future__ import annotations

from ..constraints.grammar_state import GrammarState

ARGUMENT = "mlflow_llm"  # the entry of a request's ``extra_args`` that says how its tokens are drawn
grammar_states: dict[str, GrammarState] = {}
failures: dict[str, int] = {}
"""The sequences that got no token in the last step, each with the sampler's number below 0 that says why."""
is_engine = False
"""Whether this is the process of the engine, and not a worker of it."""
