"""The media that a request may have read: files below an allowed directory and inline data."""

import base64
import importlib.util
import io
import os
import sys
import tracemalloc

import pytest
from PIL import Image

from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.errors import InvalidField, RequestError
from mlflow_llm.serving.interface.request import MediaPart, Message, TextPart
from mlflow_llm.serving.tasks.media import media, source
from mlflow_llm.serving.tasks.media.media import MAX_IMAGES, images_of
from mlflow_llm.serving.tasks.media.source import Sources

NONE = DialectSettings()


def image(color=(1, 2, 3), size=(3, 2)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format="PNG")
    return file.getvalue()


def part(number=0, **fields):
    where = f"messages[0].content[{number}]"
    given = {"kind": "image", "max_bytes": 20 << 20, "field": f"{where}.image_url.url", "part": where}
    return MediaPart(**(given | fields))


def data_part(data, number=0, **fields):
    return part(number, source="data", content=base64.b64encode(data).decode(), **fields)


def file_part(path, number=0, **fields):
    return part(number, source="path", place=str(path), content=str(path), **fields)


def asked(*parts, settings=NONE, reads_images=True):
    messages = [Message(role="user", content=parts)]
    return images_of(messages, settings, reads_images=reads_images, deadline=None)


def refusal(*parts, settings=NONE, reads_images=True):
    with pytest.raises(InvalidField) as caught:
        asked(*parts, settings=settings, reads_images=reads_images)
    assert caught.value.param
    return caught.value.message


@pytest.fixture
def inside(tmp_path):
    made = tmp_path / "media"
    (made / "deep").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(image((9, 9, 9)))
    (made / "a.png").write_bytes(image())
    (made / "deep" / "b.png").write_bytes(image((4, 5, 6)))
    return made


@pytest.fixture
def allowed(inside):
    return DialectSettings(allowedLocalMediaPath=str(inside))


def test_images_in_their_order(inside, allowed):
    """Images of several messages come in the order of the messages, each with its part; texts have none."""
    first, second, third = (
        data_part(image((7, 8, 9))),
        file_part(inside / "deep/b.png", 1),
        file_part(inside / "a.png"),
    )
    messages = [
        Message(role="system", content="text"),
        Message(role="user", content=(TextPart("a"), first, TextPart("b"), second)),
        Message(role="assistant", content=()),
        Message(role="user", content=(third,)),
    ]
    found = images_of(messages, allowed, reads_images=True, deadline=None)
    assert [one.data[:3] for one in found] == [bytes((7, 8, 9)), bytes((4, 5, 6)), bytes((1, 2, 3))]
    assert [one.part for one in found] == [first, second, third]
    assert {(one.width, one.height, len(one.data)) for one in found} == {(3, 2, 18)}


def test_text_costs_nothing(monkeypatch):
    """A request without media loads and allocates nothing for images."""
    monkeypatch.setattr(media, "Sources", None)
    monkeypatch.setattr(media, "check_parts", None)
    messages = [Message(role="user", content="text"), Message(role="user", content=(TextPart("a"),))] * 50
    assert images_of(messages, NONE, reads_images=True, deadline=None) == ()
    tracemalloc.start()
    try:
        images_of(messages, NONE, reads_images=False, deadline=None)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


def test_models_that_read_only_text(inside, allowed):
    """A text-only model refuses the first part by its dialect's type, unless another may not be read at all."""
    shown = data_part(image(), name="input_image")
    found = refusal(shown, reads_images=False)
    assert (
        found
        == "messages[0].content[0].type: 'input_image' is not allowed; expected \"text\": this model reads text only"
    )
    for bad in (file_part("/etc/passwd", 1), part(1, source="url", place="h.example", content="http://h.example/a")):
        assert refusal(shown, bad, reads_images=False).startswith("messages[0].content[1].image_url.url: ")


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_other_media(kind):
    """Videos and audio are refused by any model, with the type of the part."""
    found = refusal(data_part(image()), data_part(b"x", 1, kind=kind, name=f"{kind}_url"))
    assert found.startswith(
        f'messages[0].content[1].type: \'{kind}_url\' is not allowed; expected "text" or "image_url"'
    )


def test_how_many(monkeypatch):
    """More images than a request may have are refused before any is read."""
    monkeypatch.setattr(media, "Sources", None)
    found = refusal(*(data_part(image(), number) for number in range(MAX_IMAGES + 1)))
    assert found.startswith(f"messages[0].content[{MAX_IMAGES}].image_url.url: '101 images' is not allowed")


def test_pixels_of_all_together(monkeypatch):
    """The part that exceeds what all images of a request may have is named."""
    monkeypatch.setattr(media, "MAX_ALL_PIXELS", 13)
    found = refusal(*(data_part(image(), number) for number in range(3)))
    assert found.startswith("messages[0].content[2].image_url.url: 'a PNG file'")
    assert found.endswith("in all images of a request together: it has 6 pixels")


def test_without_pillow(monkeypatch):
    """Without Pillow the error says what to install, before anything is read; other errors come first."""
    monkeypatch.setattr(media, "Sources", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError) as caught:
        asked(data_part(image()))
    assert caught.value.message == (
        "messages[0].content[0].image_url.url: reading images needs the package pillow: "
        "pip install 'mlflow-llm[images]'"
    )
    assert caught.value.param == "messages[0].content[0].image_url.url"
    assert "text only" in refusal(data_part(image()), reads_images=False)


def test_data_of_a_wrong_size():
    """Data in the request is checked for its size and its base64 again."""
    assert "1 to 20971520 bytes" in refusal(data_part(b""))
    assert "1 to 3 bytes" in refusal(data_part(b"1234", max_bytes=3))
    for content in ("a", "ä==", "!!!!"):
        assert refusal(part(source="data", content=content)).endswith("valid base64")


def test_links_within(inside, allowed):
    """Links to files and directories below the directory are followed, and the directory itself may be one."""
    (inside / "link.png").symlink_to("deep/b.png")
    (inside / "linked").symlink_to("deep")
    alias = inside.parent / "alias"
    alias.symlink_to(inside)
    paths = [inside / "link.png", inside / "linked" / "b.png", alias / "a.png", f"{inside}/deep/../a.png"]
    for settings in (allowed, DialectSettings(allowedLocalMediaPath=str(alias))):
        found = asked(*map(file_part, paths), settings=settings)
        assert [one.data[0] for one in found] == [4, 4, 1, 1]


def test_paths_outside(inside, allowed):
    """A path outside the directory, by dots, links or absence, is never read."""
    (inside / "out.png").symlink_to(inside.parent / "secret.png")
    (inside / "up").symlink_to("..")
    (inside / "gone.png").symlink_to(inside.parent / "nothing.png")
    outside = [
        inside.parent / "secret.png",
        inside.parent / "nothing.png",
        f"{inside}/../secret.png",
        f"{inside}/deep/../../secret.png",
        inside / "out.png",
        inside / "up" / "secret.png",
        inside / "gone.png",
        f"{inside}-other/a.png",
        "/etc/passwd",
        "/proc/self/environ",
        "relative.png",
        "/a\0b",
        "/\ud800",
        "/" + "a/" * 4000,
    ]
    for path in outside:
        shown = file_part(path)
        below = f"expected a path below {inside} (allowedLocalMediaPath)"
        for found in (refusal(shown, settings=allowed), raised(shown, allowed)):
            assert found.endswith(below), path
    assert refusal(file_part(inside / "a.png")).endswith("no local path: allowedLocalMediaPath allows none")


def raised(shown, settings):
    """Return the refusal of reading itself, as if nothing had been checked before."""
    with pytest.raises(InvalidField) as caught:
        Sources(settings, None).read(shown)
    return caught.value.message


def test_paths_that_are_not_regular_files(inside, allowed):
    """Directories, FIFOs, devices, sockets and files that are not there are refused without waiting for them."""
    os.mkfifo(inside / "fifo.png")
    for path in (inside / "deep", inside / "fifo.png", inside / "nothing.png", inside / "a.png" / "b.png", inside):
        assert "a file that is there" in refusal(file_part(path), settings=allowed)
        assert "a file that is there" in raised(file_part(path), allowed)
    for path in ("/dev/zero", "/dev/stdin", "/dev/null"):
        with pytest.raises(InvalidField):
            Sources(DialectSettings(allowedLocalMediaPath="/dev"), None).read(file_part(path))


def test_sizes_of_files(inside, allowed, monkeypatch):
    """Empty files and those that are too large are refused, also one that grows while it is read."""
    (inside / "empty.png").write_bytes(b"")
    (inside / "large.png").write_bytes(bytes(1001))
    for reading in (lambda shown: refusal(shown, settings=allowed), lambda shown: raised(shown, allowed)):
        assert "'0 bytes' is not allowed; expected 1 to 1000 bytes" in reading(
            file_part(inside / "empty.png", max_bytes=1000)
        )
        assert "'1001 bytes' is not allowed" in reading(file_part(inside / "large.png", max_bytes=1000))
    real = source.check_size

    def grows(shown, size):
        with open(inside / "a.png", "ab") as file:
            file.write(bytes(5000))
        real(shown, size)

    monkeypatch.setattr(source, "check_size", grows)
    assert "'1001 bytes' is not allowed" in raised(file_part(inside / "a.png", max_bytes=1000), allowed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(inside, allowed):
    """A file without permission is refused."""
    (inside / "a.png").chmod(0)
    assert refusal(file_part(inside / "a.png"), settings=allowed).endswith("a file that is there and may be read")


@pytest.mark.parametrize("swap", ["directory", "file", "fifo", "gone"])
def test_swapped_after_the_check(inside, allowed, monkeypatch, swap):
    """A name that becomes a link, a FIFO or nothing between the check and its use leads nowhere else."""
    outside = inside.parent / "outside"
    outside.mkdir()
    (outside / "b.png").write_bytes(image((9, 9, 9)))
    real, target = source.locate, inside / "deep" / "b.png"

    def swapped(shown, allowed):
        found = real(shown, allowed)
        target.unlink()
        if swap == "directory":
            target.parent.rmdir()
            target.parent.symlink_to(outside)
        elif swap == "file":
            target.symlink_to(outside / "b.png")
        elif swap == "fifo":
            os.mkfifo(target)
        return found

    monkeypatch.setattr(source, "locate", swapped)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    assert "a file that is there and may be read" in refusal(file_part(target), settings=allowed)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_fifo_at_the_last_moment(inside, allowed, monkeypatch):
    """A file that becomes a FIFO after it was checked is opened without blocking, and refused."""
    target = inside / "a.png"
    real = os.stat

    def swapped(path, **options):
        found = real(path, **options)
        if path == "a.png":
            target.unlink()
            os.mkfifo(target)
        return found

    monkeypatch.setattr(source.os, "stat", swapped)
    assert raised(file_part(target), allowed).endswith("a regular file")


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_messages_of_the_user_have_images(role: str) -> None:
    """Images are allowed in user messages alone, even in MindIE's dialect."""
    part = MediaPart(
        kind="image", source="data", content="aGVsbG8=", max_bytes=10, field="f", part="messages[0].content[0]"
    )
    given = [Message(role=role, content=(part,))]  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=r"messages\[0\].content\[0\].type.*only messages of the user"):
        images_of(given, DialectSettings(), reads_images=True, deadline=None)
