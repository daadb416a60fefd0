"""Images decoded in a confined process: transformers' pixels to the bit, and errors for everything else."""

import contextlib
import io
import os
import random
import struct
import warnings
import zlib

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms
from transformers.image_utils import load_image

from mlflow_llm.serving.interface.errors import InvalidField, LimitExceeded, Overloaded
from mlflow_llm.serving.interface.request import MediaPart
from mlflow_llm.serving.sandbox import NoProcess, Pool
from mlflow_llm.serving.tasks.media import images
from mlflow_llm.serving.tasks.media.images import MAX_PIXELS, ImageRoom, decoded

PART = MediaPart(
    kind="image", source="data", max_bytes=20 << 20, field="messages[0].content[0].url", part="messages[0]"
)
SIZES = ((1, 1), (37, 21), (64, 48))
WAYS = [
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "L", {}),
    ("PNG", "LA", {}),
    ("PNG", "1", {}),
    ("PNG", "P", {}),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "P", {"transparency": bytes(range(256))}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    ("PNG", "L", {"transparency": 7}),
    ("PNG", "I;16", {}),
    ("PNG", "RGB", {"gamma": 0.5, "dpi": (300, 300), "icc": True}),
    ("JPEG", "RGB", {"quality": 90}),
    ("JPEG", "RGB", {"progressive": True, "subsampling": 0, "icc": True}),
    ("JPEG", "L", {}),
    ("JPEG", "CMYK", {}),
    ("MPO", "RGB", {"save_all": True}),
    ("WEBP", "RGB", {"quality": 60}),
    ("WEBP", "RGB", {"lossless": True, "icc": True}),
    ("WEBP", "RGBA", {"quality": 60}),
    ("WEBP", "RGBA", {"lossless": True, "exact": True}),
    ("WEBP", "RGBA", {"save_all": True}),
    ("GIF", "P", {}),
    ("GIF", "P", {"transparency": 5}),
    ("GIF", "P", {"save_all": True, "transparency": 5, "disposal": 2}),
    ("GIF", "L", {}),
    ("GIF", "1", {}),
    ("PNG", "RGBA", {"save_all": True}),
]


def drawn(mode, size, seed=0):
    """Return an image of random pixels."""
    rng = random.Random(f"{mode}{size}{seed}")
    width, height = size
    if mode == "I;16":
        return Image.frombytes("I;16", size, rng.randbytes(2 * width * height))
    if mode == "1":
        return Image.frombytes("L", size, rng.randbytes(width * height)).point(lambda x: 255 * (x > 127)).convert("1")
    bands = len(Image.new(mode, (1, 1)).getbands())
    found = Image.frombytes(mode, size, rng.randbytes(bands * width * height))
    if mode == "P":
        found.putpalette(rng.randbytes(768))
    return found


def encoded(image, format, **options):
    if options.pop("icc", False):
        options["icc_profile"] = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    if options.get("save_all"):
        options["append_images"] = [drawn(image.mode, image.size, seed) for seed in (1, 2)]
    file = io.BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


def expected(data):
    with warnings.catch_warnings(action="ignore"):
        found = load_image(Image.open(io.BytesIO(data)))
    return found.size, found.tobytes()


def pixels(data):
    found = decoded(data, PART)
    assert found.part is PART
    return (found.width, found.height), found.data


def refusal(data, left=images.MAX_ALL_PIXELS):
    with pytest.raises(InvalidField) as caught:
        decoded(data, PART, left)
    assert caught.value.param == PART.field
    return caught.value.message.removeprefix(PART.field + ": ")


@pytest.mark.parametrize(("format", "mode", "options"), WAYS)
def test_pixels_are_those_of_transformers(format, mode, options):
    """Pixels of every format, mode and transparency, and of first frames, are bit for bit those of load_image."""
    for size in SIZES:
        data = encoded(drawn(mode, size), format, **options)
        assert pixels(data) == expected(data), size


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation(format, orientation):
    """Images are rotated by their EXIF orientation, and undefined values rotate nothing."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = "größe"
    data = encoded(drawn("RGB", (24, 16)), format, exif=exif)
    found = pixels(data)
    assert found == expected(data)
    assert found[0] == ((16, 24) if orientation in (5, 6, 7, 8) else (24, 16))


def test_damaged_exif():
    """EXIF data damaged in any byte has the same effect as in transformers: none, or an error."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "text"
    whole = exif.tobytes()
    for at in range(len(whole)):
        data = encoded(drawn("RGB", (8, 4)), "JPEG", exif=whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            wanted = expected(data)
        except Exception:
            assert "it is damaged" in refusal(data)
        else:
            assert pixels(data) == wanted


def test_many_images_of_one_process():
    """A sandboxed process decodes every format, even ones first seen later, and its results stay the same."""
    images.IMAGES.close()
    for format in ("PNG", "JPEG", "WEBP", "GIF") * 3:
        data = encoded(drawn("RGB", (40, 30)), format)
        assert pixels(data) == expected(data)
    assert len(images.IMAGES.processes) == 1


@pytest.mark.parametrize(
    ("format", "what"),
    [("BMP", "a BMP file"), ("TIFF", "a TIFF file"), ("ICO", "a file of"), ("AVIF", "a HEIC, AVIF or video file")],
)
def test_other_formats(format, what):
    """Formats that are not decoded are named, even those that Pillow knows."""
    found = refusal(encoded(drawn("RGB", (16, 16)), format))
    assert found.startswith(f"'{what}")
    assert found.endswith(
        "expected an image in PNG, JPEG, WebP or GIF with at most 33554432 pixels that can be decoded: "
        "it is none of these or is damaged"
    )


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG file"),
        (b"<!DOCTYPE html><html></html>", "an HTML file"),
        (b"%PDF-1.7\n", "a PDF file"),
        (b"hello", "a file of 5 bytes"),
        (b"\x89PNG\r\n\x1a\n", "a PNG file"),
        (b"\xff\xd8\xff", "a JPEG file"),
        (b"RIFF\x04\0\0\0WEBP", "a WebP file"),
        (b"GIF89a", "a GIF file"),
        (b"P6 1 1 255 abc", "a file of 14 bytes"),
    ],
)
def test_what_is_no_image(data, what):
    """The error says what was sent, without the address of an object or a byte of the file."""
    found = refusal(data)
    assert found.startswith(f"'{what}' is not allowed")
    assert "0x" not in found


@pytest.mark.parametrize("way", [way for way in WAYS if not way[2] or "save_all" in way[2]], ids=str)
def test_truncated(way):
    """A file truncated at any byte is refused or decoded as by transformers."""
    format, mode, options = way
    data = encoded(drawn(mode, (9, 7)), format, **options)
    ends = range(1, len(data)) if len(data) < 400 else sorted(random.Random(0).sample(range(1, len(data)), 120))
    for end in ends:
        cut = data[:end]
        try:
            wanted = expected(cut)
        except Exception:
            refusal(cut)
        else:
            assert pixels(cut) == wanted


def test_half_a_file_ends_too_early():
    """Half a file is refused as ending too early."""
    data = encoded(drawn("RGB", (64, 64)), "JPEG")
    assert refusal(data[: len(data) // 2]).endswith("can be decoded: it ends too early")


@given(data=st.binary(max_size=400), head=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a"]))
@example(data=b"\0\0\0\rIHDR\0\0\0\0\0\0\0\0\x08\x02\0\0\0", head=b"\x89PNG\r\n\x1a\n")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_bytes(data, head):
    """Random bytes are decoded or refused."""
    if head + data:
        with contextlib.suppress(InvalidField):
            found = decoded(head + data, PART)
            assert len(found.data) == 3 * found.width * found.height


@given(at=st.integers(0, 10**6), value=st.integers(0, 255), way=st.sampled_from(WAYS))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_changed_bytes(at, value, way):
    """An image with a changed byte is decoded to as many bytes as its size says, or refused."""
    format, mode, options = way
    data = bytearray(encoded(drawn(mode, (9, 7)), format, **options))
    data[at % len(data)] = value
    with contextlib.suppress(InvalidField):
        found = decoded(bytes(data), PART)
        assert len(found.data) == 3 * found.width * found.height


def png(width, height, rows):
    """Return a 1-bit PNG whose header has ``width`` and ``height``."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes((width + 7) // 8 + 1) * rows, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_the_largest_image():
    """An image of exactly the limit is decoded; one of a pixel more is refused, however small its file."""
    data = png(2**13, 2**12, 2**12)
    assert decoded(data, PART).data == bytes(3 * MAX_PIXELS)
    found = refusal(png(MAX_PIXELS + 1, 1, 1))
    assert found.endswith("with at most 33554432 pixels that can be decoded: it has 33554433 pixels")


@pytest.mark.parametrize(
    "data",
    [
        png(2**31 - 1, 2**31 - 1, 0),
        png(2**20, 2**20, 0),
        b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0;",
        b"RIFF\x1a\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + b"\xff\x3f\0" * 2,
        b"RIFF\x1a\0\0\0WEBPVP8L\x0a\0\0\0\x2f" + b"\xff" * 9,
    ],
    ids=["png", "smaller png", "gif", "webp", "lossless webp"],
)
def test_bombs(data):
    """A header that promises too many pixels is refused as such, with nothing decoded."""
    assert "pixels that can be decoded: it has" in refusal(data)


def test_a_gif_of_many_frames():
    """Only the first of an animation's 5,000 frames is decoded."""
    frame = encoded(drawn("P", (8, 8)), "GIF")
    body = frame[13 + 768 : -1]  # behind the header and its table of colors
    data = frame[:-1] + body * 5000 + b";"
    assert pixels(data) == expected(frame)


def test_more_than_a_request_may_have():
    """The pixels left to a request limit an image too, and the error says so."""
    data = encoded(drawn("L", (10, 10)), "PNG")
    assert decoded(data, PART, left=100).width == 10
    assert refusal(data, left=99).endswith(
        "at most 67108864 pixels in all images of a request together: it has 100 pixels"
    )
    assert "together" in refusal(data, left=0)


def test_a_image_that_takes_too_long():
    """A small file with thousands of scans is stopped by the time limit for its few pixels."""
    data = encoded(Image.new("L", (512, 512), 128), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    found = refusal(data[:last] + data[last:-2] * 30_000 + data[-2:])
    assert found.endswith("decoding it takes too much time or memory")


def test_no_process(monkeypatch):
    """Without a process the error is a 503 with Retry-After that does not blame the image."""

    def none(*_, **__):
        raise NoProcess("all processes are busy")

    monkeypatch.setattr(Pool, "run", none)
    with pytest.raises(Overloaded, match="all processes are busy") as caught:
        decoded(b"x", PART)
    assert caught.value.retry_after == 1.0


def test_a_process_cannot_open_anything():
    """From its first image on a process has a descriptor limit of zero."""
    decoded(encoded(drawn("L", (1, 1)), "PNG"), PART)
    for process in images.IMAGES.processes:
        with open(f"/proc/{process.pid}/limits") as limits:
            (line,) = (line for line in limits if line.startswith("Max open files"))
        assert line.split()[3:5] == ["0", "0"]
        assert sorted(map(int, os.listdir(f"/proc/{process.pid}/fd"))) == [0, 1, 2, 3]


def test_thin_images_are_refused() -> None:
    """Thin images are refused, since an image processor that scales the shorter side would make gigabytes of them."""
    file = io.BytesIO()
    Image.new("RGB", (5100, 100)).save(file, "PNG")
    part = MediaPart(kind="image", source="data", max_bytes=10**6, field="f", part="p")
    with pytest.raises(InvalidField, match=r"5100 x 100 pixels.* at most 50 times"):
        decoded(file.getvalue(), part)


def test_room_is_asked_before_the_pixels_are_made(monkeypatch) -> None:
    """An image for whose pixels there is no room is refused by the size in its header, and never decoded."""
    work, run = [], Pool.run

    def counted(pool, name, *rest, **more):
        work.append(name)
        return run(pool, name, *rest, **more)

    def refuse(size):
        raise LimitExceeded(f"images: {size} bytes", limit="body_bytes")

    monkeypatch.setattr(Pool, "run", counted)
    data = encoded(drawn("RGB", (37, 21)), "PNG")
    with pytest.raises(LimitExceeded, match=f"images: {3 * 37 * 21} bytes"):
        decoded(data, PART, room=ImageRoom(keep=refuse))
    assert work == ["image_size"]
    kept = []
    assert len(decoded(data, PART, room=ImageRoom(keep=kept.append)).data) == sum(kept)
