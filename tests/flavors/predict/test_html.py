"""HTML of models, answers, streams and comparisons, as a notebook shows them."""

from __future__ import annotations

import sys
from html.parser import HTMLParser

import pytest
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.predict import html
from mlflow_llm.flavors.llm.predict.answers import Answer, Comparison
from mlflow_llm.serving.interface.reply import Choice, ReplyCall, TextLogprob, Usage

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</div></td></table><iframe src=javascript:alert(1)>",
    "<!--<img src=--><img src=x onerror=alert(1)//>",
    "&lt;script&gt;",
]
USAGE = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)


class Tags(HTMLParser):
    """A collector of the names of tags, of their attributes, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(f"{tag}.{name}" for name, _ in attrs)}

    def handle_data(self, data):
        self.text += data


ALLOWED = {
    "table", "tr", "th", "th.style", "td", "td.style", "div", "div.style", "code", "details", "summary", "span",
    "span.style", "span.title",
}  # fmt: skip


def answer(text: str, *, logprobs: bool = False) -> Answer:
    token = TextLogprob(token=text, bytes=tuple(text.encode()), token_id=1, logprob=-0.5)
    given = (TextLogprob(token=text, bytes=token.bytes, token_id=1, logprob=-0.5, top=(token,)),) if logprobs else ()
    call = ReplyCall(id="1", name=text, arguments=text)
    choice = Choice(
        index=0, text=text, reasoning=text, calls=(call,), finish_reason="stop", text_logprobs=given, logprobs=given
    )
    return Answer(choices=(choice,), usage=USAGE)


@pytest.mark.parametrize("attack", ATTACKS)
def test_texts_are_escaped(attack):
    """Text, reasoning, calls, tokens, adapters and facts appear as text: no tag or attribute comes of them."""
    shown = [
        answer(attack)._repr_html_(),
        answer(attack, logprobs=True)._repr_html_(),
        Comparison({attack: answer(attack)})._repr_html_(),
        html.of_text(attack, attack, None, None),
        html.of_model([("Model", attack)], attack),
    ]
    for source in shown:
        found = Tags(source)
        assert found.names <= ALLOWED
        assert attack in found.text
    assert "36.1%" not in shown[0]
    assert "60.7%" in shown[1]


@pytest.fixture(scope="module")
def model(llama_dir, adapter_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m"
    llm.save_model(path, llama_dir, adapters={"formal": adapter_dir})
    with llm.load_model(str(path), in_process=True) as loaded:
        yield loaded


def test_a_model_says_what_it_is(model):
    """A model shows tasks, adapters, sizes and a line to try, and its context once it runs."""
    model.chat("Hi", max_tokens=1)
    text = Tags(model._repr_html_()).text
    for part in ("chat, completions", "formal", "256 tokens", "kB", 'model.chat("Hello", max_tokens=64)'):
        assert part in text


def test_log_probabilities_make_a_heat_map(model):
    """With ``logprobs`` each token has its ground and hint, and together they are the text."""
    found = model.chat("Hi", max_tokens=4, logprobs=True, top_logprobs=2, temperature=0, ignore_eos=True)
    shown = Tags(found._repr_html_())
    if html.covers(found.choices[0]):
        assert "span.title" in shown.names
    assert shown.text.endswith(" + 4 tokens, length")


def test_compare_asks_every_adapter(model):
    """``compare`` has the answers that ``chat`` gives, as a frame and a table; an unknown adapter is refused."""
    found = model.compare("Hi", max_tokens=4, temperature=0, ignore_eos=True)
    assert list(found.frame.index) == ["base", "formal"]
    for name, adapter in (("base", None), ("formal", "formal")):
        alone = model.chat("Hi", adapter=adapter, max_tokens=4, temperature=0, ignore_eos=True).text
        assert found[name].text == found.frame.loc[name, "text"] == alone
    assert list(model.compare("Hi", adapters=["formal"], max_tokens=1).answers) == ["formal"]
    with pytest.raises(MlflowException, match="adapter: no adapter 'nope'"):
        model.compare("Hi", adapters=["nope"])


def test_a_stream_is_shown_live(model, monkeypatch):
    """In a notebook a stream updates its display until it has ended; at a terminal it is printed."""
    display = pytest.importorskip("IPython.display")
    import IPython

    shown = []

    class Handle:
        def update(self, data):
            shown.append(data.data)

    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": 1})())
    monkeypatch.setattr(display, "display", lambda data, display_id: Handle())
    asked = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    model.chat("Hi", stream=True, **asked)._ipython_display_()
    assert model.chat("Hi", **asked).text in Tags(shown[-1]).text
    assert "4 tokens, length" in shown[-1]
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    printed = []
    monkeypatch.setattr(sys.stdout, "write", printed.append)
    model.chat("Hi", stream=True, **asked)._ipython_display_()
    assert "".join(printed).strip() == model.chat("Hi", **asked).text.strip()
