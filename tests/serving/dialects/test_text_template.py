"""The bytes around a streamed text, prepared once."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.dialects import sse
from mlflow_llm.serving.dialects.text_template import TextTemplate

HOSTILE = '{"a":"0"} \\ \u2028 "1" \n 0'


@pytest.mark.parametrize("text", ["", "a", '"', "\\", HOSTILE, "\x00\x1f\x7f", "\u00e9\U0001f600", "0", "1"])
@pytest.mark.parametrize("around", ["m", "0", "1", HOSTILE])
def test_the_same_bytes_as_encoded_whole(text: str, around: str) -> None:
    """A text put into the template gives the bytes of the whole encoded anew."""

    def encode(said: str) -> bytes:
        return sse.event({"model": around, "text": said, "last": [around, 0, 1]})

    assert TextTemplate(encode).fill(text) == encode(text)
