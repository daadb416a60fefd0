"""The confined process: a script that reads requests from standard input and ends when that is closed.

It imports only the standard library until work needs more, and nothing of this package, so it costs 0.1 s and 20 MB.

::

    in    32 bytes (two lengths, CPU seconds, bytes of memory), then JSON: {"work": name, ...}, then raw bytes
    out   17 bytes (kind, two lengths), then UTF-8, then raw bytes
          v  the work's value as JSON         t  a plain text       b  a value as JSON, and raw bytes
          e  the exception, as JSON           m  out of memory      o  too much output
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

HEAD = struct.Struct("<QQdq")
ANSWER = struct.Struct("<cQQ")
_template_cache: dict[str, str] = {}  # chat templates, by the key that later requests send instead of the template
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MEGAPIXEL = 1 << 20
_statm_descriptors: list[int] = []  # the descriptor of this process's own memory statistics
_pillow_modules: list[Any] = []  # its modules Image and ImageOps, once they are loaded


class TooLong(Exception):
    """The output is over its limit."""


class TooManyPixels(Exception):
    """An image has more than the request allows, or none; the text is their number."""


class Raw(NamedTuple):
    """A value that consists of raw bytes, and what JSON says of them."""

    about: Any
    data: bytes


# -- the work


def render(
    key: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    output: int,
    source: str | None = None,
    end: str = "generation_prompt",
) -> str:
    """Render a chat as transformers' ``apply_chat_template(tokenize=False)`` does; for ``end`` see ``RawChat``."""
    texts, _ = _transformers().render_jinja_template(
        conversations=[messages],
        chat_template=_source(key, source),
        add_generation_prompt=end == "generation_prompt",
        continue_final_message=end == "open",
        **variables,
    )
    text: str = texts[0]
    if len(text) > output:
        raise TooLong
    return text


def reads(key: str, source: str | None = None) -> list[str] | None:
    """Return the variables that a chat template reads from its context, or None if they cannot be determined."""
    from jinja2 import meta, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import SandboxedEnvironment  # other environments evaluate constants while they compile

    class Generation(Extension):
        """transformers' ``{% generation %}``, which marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment: Any = SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", Generation])
    try:
        return sorted(meta.find_undeclared_variables(environment.parse(_source(key, source))))
    except MemoryError:
        raise
    except Exception:  # it is invalid, which rendering will report, or it has tags that are unknown here
        return None


def match(patterns: list[str], names: list[str]) -> list[int]:
    """Return for each name the index of the first pattern that matches its dotted suffix (peft's rule), or -1."""
    compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
    return [next((i for i, one in enumerate(compiled) if one.match(name)), -1) for name in names]


def tokenizer(path: str, probes: list[str]) -> list[int]:
    """Encode each probe with a tokenizer.json and special tokens, decode it again, and return the numbers of tokens."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(path)
    found.no_padding()
    found.no_truncation()
    counts = []
    for probe in probes:
        ids = found.encode(probe, add_special_tokens=True).ids
        counts.append(len(ids))
        found.decode(ids[: 4 * len(probe) + 64])
    return counts


def image_size(data: bytes, maximum: int) -> int:
    """Return the number of pixels that an image's header says. Raises ``TooManyPixels`` for more than ``maximum``."""
    image = _opened(data, maximum)
    return int(image.width * image.height)


def image(data: bytes, maximum: int) -> Raw:
    """Decode an image as transformers' ``load_image`` does: the first frame, turned as its EXIF data says, as RGB.

    Return (width, height) and the pixels. Raises ``TooManyPixels`` for more than ``maximum`` before they are decoded.
    """
    image = _opened(data, maximum)
    _limit(*image_limits(image.width * image.height, len(data)))
    image = _pillow()[1].exif_transpose(image)
    image = image.convert("RGB")
    return Raw(image.size, image.tobytes())


def _opened(data: bytes, maximum: int) -> Any:
    image_module, _ = _pillow()
    image_module.MAX_IMAGE_PIXELS = maximum / 2  # raises at twice that: some decoders make room before they say a size
    try:
        image = image_module.open(io.BytesIO(data), formats=FORMATS)
    except image_module.DecompressionBombError as error:
        raise TooManyPixels(re.findall("[0-9]+", str(error))[0]) from None
    pixels = image.width * image.height
    if not 0 < pixels <= maximum:
        raise TooManyPixels(str(pixels))
    return image


def image_limits(pixels: int, size: int) -> tuple[float, int]:
    """Return the CPU seconds and the bytes of memory for an image of so many pixels in a file of ``size`` bytes.

    The slowest format, PNG, takes 0.08 s a megapixel on a server's CPU. A pixel takes up to 16 bytes in a decoder
    and 18 in copies.
    """
    return 2.0 + 0.5 * pixels / MEGAPIXEL, (128 << 20) + 40 * pixels + 4 * size


WORK: dict[str, Callable[..., Any]] = {
    "render": render,
    "reads": reads,
    "match": match,
    "tokenizer": tokenizer,
    "image": image,
    "image_size": image_size,
}


def _source(key: str, source: str | None) -> str:
    return _template_cache[key] if source is None else _template_cache.setdefault(key, source)


def _transformers() -> Any:
    """Load transformers' chat template module without the rest of its package (0.8 s, 40 MB).

    The file is transformers' own; modules that it needs for purposes other than rendering are replaced by stubs. If the
    stubs do not suffice, the whole package is imported.
    """
    name = "transformers.utils.chat_template_utils"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec("transformers")  # does not run the package
    places = spec.submodule_search_locations if spec is not None else None
    assert places, "the package depends on it"
    root = places[0]
    before = set(sys.modules)
    try:
        _stand_in("transformers", __path__=[root])
        _stand_in("transformers.utils", __path__=[os.path.join(root, "utils")])
        import logging

        _stand_in("transformers.utils.logging", get_logger=logging.getLogger)
        no, yes = (lambda: False), (lambda: True)
        _stand_in(
            "transformers.utils.import_utils",
            is_jinja_available=yes,
            is_torch_available=no,
            is_vision_available=no,
        )
        if "numpy" not in sys.modules:  # values from JSON include no NumPy scalars
            _stand_in("numpy", generic=type("generic", (), {}))
        return importlib.import_module(name)
    except Exception:
        for added in set(sys.modules) - before:
            if added.partition(".")[0] in ("transformers", "numpy"):
                del sys.modules[added]
        return importlib.import_module(name)


def _stand_in(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def _pillow() -> list[Any]:
    """Load Pillow with the decoders of ``FORMATS``, once; from then on this process can open nothing.

    Decoders are written in C and read what strangers send. Without new descriptors, whoever takes over a decoder reads
    no file and reaches no network.
    """
    if not _pillow_modules:
        import copy  # noqa: F401
        import encodings.utf_16  # noqa: F401 - whatever is loaded later must be loaded now

        from PIL import (  # noqa: F401 - the plugins register themselves
            GifImagePlugin,
            Image,
            ImageOps,
            ImagePalette,
            JpegImagePlugin,
            MpoImagePlugin,
            PngImagePlugin,
            TiffImagePlugin,  # reads EXIF data
            WebPImagePlugin,
        )

        Image.preinit()
        _pillow_modules.extend((Image, ImageOps))
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    return _pillow_modules


# -- the loop


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.closerange(3, 4096)  # descriptors that the parent did not mark as close-on-exec
    sys.path[:] = json.loads(sys.argv[1])
    _give_up_rights()
    with contextlib.suppress(OSError):  # on a system without /proc, time and output are still limited
        _statm_descriptors.append(os.open("/proc/self/statm", os.O_RDONLY))
    while head := _read(HEAD.size):
        length, size, seconds, memory = HEAD.unpack(head)
        _limit(seconds, memory)
        answer, again = _answer(_read(length), _read(size))
        for part in answer:
            _write(part)
        if not again:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        del answer, part


def _answer(request: bytes, data: bytes) -> tuple[tuple[bytes, ...], bool]:
    """Do the work; return the parts of the answer, and whether this process can take more work."""
    try:
        asked = json.loads(request)
        value = WORK[asked.pop("work")](**asked, **({"data": data} if data else {}))
        if isinstance(value, Raw):
            return _framed(b"b", json.dumps(value.about).encode(), value.data), True
        if isinstance(value, str):
            return _framed(b"t", value.encode(errors="surrogatepass")), True
        return _framed(b"v", json.dumps(value).encode()), True
    except MemoryError:
        return _framed(b"m", b""), False
    except TooLong:
        return _framed(b"o", b""), False
    except BaseException as error:  # a template may raise anything, even an exception whose str() fails
        try:
            raised = {
                "kind": type(error).__name__,
                "message": str(error)[:2000],
                "line": getattr(error, "lineno", None),
            }
        except BaseException:
            raised = {"kind": type(error).__name__, "message": "", "line": None}
        return _framed(b"e", json.dumps(raised).encode()), True


def _limit(seconds: float, memory: int) -> None:
    """Set the limits of this request. SIGPROF kills the process by default, even during a single call into C."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with contextlib.suppress(OSError, ValueError):
        for statm in _statm_descriptors:
            used = int(os.pread(statm, 256, 0).split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.RLIM_INFINITY))


def _give_up_rights() -> None:
    """Give up the rights to write files and start processes, in case a template escapes from Jinja's sandbox."""
    for name, maximum in (("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_NPROC", 0), ("RLIMIT_NOFILE", 64)):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (maximum, maximum))


def _framed(kind: bytes, text: bytes, data: bytes = b"") -> tuple[bytes, ...]:
    return ANSWER.pack(kind, len(text), len(data)) + text, data


def _read(size: int) -> bytes:
    """Read exactly ``size`` bytes; return b"" at the end of the input."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
