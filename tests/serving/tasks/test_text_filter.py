"""Filters of texts: what they find, and that no cut of a text into pieces changes what they leave."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.interface.guardrails import PII_TYPES, Pii, TextRules
from mlflow_llm.serving.tasks.text_filter import TextFilter, filtered, filtered_json

MASKING = TextRules(pii=Pii(behavior="MASK"))
BLOCKING = TextRules(invalid_keywords=("secret", "Secret plan", "机密", "c++"), pii=Pii(behavior="BLOCK"))
KEYWORDS = TextRules(invalid_keywords=("secret", "Secret plan", "c++"), pii=Pii(behavior="MASK"))
FOUND = {
    "email": ["ada.l+x@mail.example.co.uk", "a@b.io"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"],
    "credit_card": ["4111 1111 1111 1111", "4111-1111-1111-1111", "378282246310005"],
    "us_ssn": ["123-45-6789", "219 09 9999"],
    "ip_address": ["192.168.0.254", "2001:db8::8a2e:370:7334", "::1"],
    "phone": ["+49 (0)30 1234567", "+1-202-555-0143", "(202) 555-0143", "202.555.0143"],
}
OTHER = [
    "4111 1111 1111 1112", "GB82WEST12345698765433", "000-12-3456", "1.2.3.4.5", "300.1.1.1", "12:30:45",
    "version 1.22.333", "std::vector", "a@b", "@ada", "2026-11-28", "1234567890123456", "5 4 3 2 1", "§ 12 (3)",
]  # fmt: skip
PARTS = [
    *(text for texts in FOUND.values() for text in texts), *OTHER, "secret", "Secret Plan", "secretly", "c++", "机密",
    " ", ", ", ". ", "-", "+", "(", "1", "42", "ab", "Ab", "AB", "@", ":", "é", "İ", "\n", "the end",
]  # fmt: skip


@pytest.mark.parametrize("name", PII_TYPES)
def test_personal_data_is_masked(name: str) -> None:
    """Each kind is found within a sentence, and only it."""
    for text in FOUND[name]:
        for kind in PII_TYPES:
            rules = TextRules(pii=Pii(behavior="MASK", types=(kind,)))
            masked, blocked = filtered(f"It is {text}, I think.", rules)
            if kind == name:
                assert (masked, blocked) == ("It is [redacted], I think.", None), text
        assert text not in filtered(f"<{text}>", MASKING)[0]


@pytest.mark.parametrize("text", OTHER)
def test_what_only_looks_alike_stays(text: str) -> None:
    """Numbers with wrong check digits, versions, times and code are no personal data."""
    assert filtered(f"It is {text} here", MASKING) == (f"It is {text} here", None)


@pytest.mark.parametrize(
    ("text", "left", "rule"),
    [
        ("a SECRET plan", "a ", "invalid_keywords"),
        ("secretly, nonsecret", "secretly, nonsecret", None),
        ("这是机密文件", "这是", "invalid_keywords"),
        ("I like C++!", "I like ", "invalid_keywords"),
        ("mail a@b.io or secret", "mail ", "email"),
        ("secret a@b.io", "", "invalid_keywords"),
        ("mail a@b.io", "mail ", "email"),
    ],
)
def test_a_block_ends_the_text(text: str, left: str, rule: str | None) -> None:
    """The text ends before the match, and the rule is named. Keywords are words, in any case, also without spaces."""
    assert filtered(text, BLOCKING) == (left, rule)


@pytest.mark.parametrize("rules", [MASKING, BLOCKING, KEYWORDS], ids=["mask", "block", "both"])
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), seed=st.integers(0, 2**32))
def test_no_cut_changes_the_text(rules: TextRules, parts: list[str], seed: int) -> None:
    """A text in pieces leaves what the whole text does, and blocks by the same rule."""
    whole, draw = "".join(parts), random.Random(seed)
    stream, left, at = TextFilter(rules), "", 0
    expected, rule = filtered(whole, rules)
    while at < len(whole):
        size = draw.choice((1, 1, 2, 3, 7, 40))
        left += stream.push(whole[at : at + size])
        assert expected.startswith(left)
        at += size
    left += stream.push("", final=True)
    assert (left, stream.blocked) == (expected, rule)


def test_only_what_may_match_is_held_back() -> None:
    """Words pass at once, and a text that cannot become a match any more too."""
    stream = TextFilter(MASKING)
    assert stream.push("Call me. ") == "Call me. "
    assert stream.push("Write to ada") == "Write to "
    assert stream.push("@") == ""
    assert stream.push(" home ") == "ada@ home "


def test_json_is_filtered_by_value() -> None:
    """Texts, names and numbers of arguments are masked, and all else stays as it is."""
    value = {"to": ["a@b.io"], "a@b.io": True, "card": 4111111111111111, "n": 5, "none": None}
    expected = {"to": ["[redacted]"], "[redacted]": True, "card": "[redacted]", "n": 5, "none": None}
    assert filtered_json(value, MASKING) == (expected, None)
    assert filtered_json({"x": ["a@b.io"]}, BLOCKING)[1] == "email"


def test_long_texts_take_linear_time() -> None:
    """A hundred thousand characters that begin many matches and complete none pass unchanged."""
    for text in ("a." * 50_000, "1 " * 50_000, "+1" * 50_000, "ab12" * 25_000, "1:" * 50_000, "4" * 100_000):
        assert filtered(text, MASKING) == (text, None)
