"""An engine that says what a test wrote down: real events, no weights."""

from mlflow_llm.serving.interface.events import Finished, Tokens


class ScriptedStream:
    """A stream of prepared events that records calls; ``finish`` ends a sequence as an engine does."""

    def __init__(self, events):
        self.events = list(events)
        self.finished = []
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        if not self.events:
            raise StopIteration
        return self.events.pop(0)

    def finish(self, index):
        self.finished.append(index)
        mine = [e for e in self.events if e.index == index]
        cached = next((e.num_cached_tokens for e in mine if isinstance(e, Finished)), 0)
        self.events = [e for e in self.events if e.index != index] + [Finished(index, "abort", cached)]

    def close(self):
        self.closed += 1


class ScriptedEngine:
    def __init__(self, events):
        self.stream = ScriptedStream(events)
        self.requests = []

    def submit(self, request):
        self.requests.append(request)
        return self.stream


def spoken(index, token_ids, reason="stop", cached=0, chunk=1):
    """Return the events of a sequence that samples ``token_ids``, ``chunk`` at a time."""
    parts = [tuple(token_ids[i : i + chunk]) for i in range(0, len(token_ids), chunk)]
    return [*(Tokens(index, part) for part in parts), Finished(index, reason, cached, len(token_ids))]
