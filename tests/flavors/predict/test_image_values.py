"""Images as bytes and as Pillow's objects in the input of ``predict``."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mlflow_llm.flavors.llm.predict.image_values import data_url
from mlflow_llm.flavors.llm.predict.predict_input import requests_of


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def messages(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("type_of", [bytes, bytearray, memoryview])
def test_bytes_of_a_file_are_sent_as_they_are(kind: str, type_of: Any) -> None:
    """The URL has the file's own type and bytes."""
    data = encoded(Image.new("RGB", (3, 2), "red"), kind)
    assert data_url(type_of(data)) == f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "CMYK"])
def test_an_image_of_pillow_keeps_its_pixels(mode: str) -> None:
    """An image of Pillow is sent as PNG, which loses nothing; modes that PNG lacks become RGB."""
    image = Image.effect_noise((5, 4), 90).convert(mode)
    url = data_url(image)
    assert url is not None
    found = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("value", [b"", b"text", "text", 5, None])
def test_other_values_are_no_images(value: Any) -> None:
    """Nothing else becomes a URL."""
    assert data_url(value) is None


@pytest.mark.parametrize("as_bytes", [True, False])
def test_in_a_field_and_in_a_column(as_bytes: bool) -> None:
    """A dict, a list and a column of a frame may hold images within messages."""
    image = Image.new("RGB", (3, 2), "blue")
    image: Any = encoded(image) if as_bytes else image
    expected = {"messages": messages(data_url(image))}
    assert requests_of({"messages": messages(image)}, "chat") == ([expected], True)
    assert requests_of([{"messages": messages(image)}], "chat") == ([expected], False)
    frame = pd.DataFrame({"messages": [messages(image)] * 2})
    assert requests_of(frame, "chat") == ([expected] * 2, False)


@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("column", ["image", "images"])
def test_a_column_of_images_beside_the_content(column: str, as_bytes: bool) -> None:
    """The images of a row come before the text of its last message of a user; a prompt becomes such a message."""
    made = Image.new("RGB", (3, 2), "blue")
    image: Any = encoded(made) if as_bytes else made
    cell = image if column == "image" else [image, "https://x/y.png"]
    urls = [data_url(image)] if column == "image" else [data_url(image), "https://x/y.png"]
    content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Hm"}]
    cells = pd.Series([cell, None], dtype=object)
    frame = pd.DataFrame({"messages": [turns, turns], column: cells, "max_tokens": [3, 3]})
    expected = {"messages": [{"role": "user", "content": content}, turns[1]], "max_tokens": 3}
    assert requests_of(frame, "chat") == ([expected, {"messages": turns, "max_tokens": 3}], False)
    frame = pd.DataFrame({"prompt": ["What?"] * 2, column: cells})
    expected = {"messages": [{"role": "user", "content": content}]}
    assert requests_of(frame, "chat") == ([expected, {"prompt": "What?"}], False)


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        ({"prompt": "a", "image": b"text"}, r"image: '?4 bytes.*the bytes of a PNG, JPEG, WebP or GIF file"),
        ({"prompt": "a", "image": 5}, "image: 5 .*an image of Pillow"),
        ({"prompt": ["a", "b"], "image": "https://x"}, "image: .*beside messages or prompt, which is one text"),
        ({"input": "a", "images": ["https://x"]}, "images: .*beside messages or prompt"),
        ({"messages": [{"role": "system", "content": "a"}], "image": "https://x"}, "which has a message of a user"),
        ({"messages": [{"role": "user", "content": 5}], "image": "https://x"}, r"messages\[0\].content: 5"),
    ],
)
def test_images_that_belong_to_nothing(row: dict[str, Any], reported: str) -> None:
    """A cell that is no image, and a row without a message for it, are errors in their place."""
    frame = pd.DataFrame({name: pd.Series([cell, None], dtype=object) for name, cell in row.items()})
    (error, _), _ = requests_of(frame, "chat")
    assert re.search(reported, str(error)), str(error)
