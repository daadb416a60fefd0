"""How the prompts of a vision-language model contain images: found out by asking the model's own processor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....serving.interface.bundle import ImageSpec
from ....serving.interface.errors import PackagingError, reason, shown
from ....serving.model_files.image_layout import Size, expanded

# Widths and heights that tell layouts apart: small and large ones, long and high ones, with odd sides.
SIZES: tuple[Size, ...] = ((64, 64), (640, 480), (37, 411), (1025, 33), (2049, 2047), (1, 1), (300, 900))
NUM_DRAWN = 6  # further sizes, drawn anew for each model from the same seed
MAX_TILES_PER_ROW = 32  # in a row
MAX_DRAWN_SIDE = 2500  # pixels of a side that is drawn
AROUND = ("Here is", ":\n\n", "\nand what is ")  # texts beside images


def image_spec(model_dir: Path, tokenizer_dir: Path, config: Any) -> ImageSpec:
    """Return how the prompts of the model with this ``config`` contain images.

    Raises ``PackagingError`` if its processor places them in a way that no layout describes."""
    from ....serving.engine.models.image_processor import load_processor

    processor = load_processor(model_dir, tokenizer_dir)
    try:
        probe = _Probe(processor, config)
        spec = probe.fixed() or probe.grid()
        if spec is not None and all(probe.agrees(spec, sizes) for sizes in _pairs()):
            return spec
    except PackagingError:
        raise
    except Exception as error:  # of the processor's code
        raise PackagingError(f"model: its processor cannot read an image: {reason(error)}") from None
    name = type(processor).__name__
    raise PackagingError(f"model: {name} gives images tokens in a way that this release does not know")


def check_templates(templates: dict[str, str], tokenizer: Any, spec: ImageSpec) -> None:
    """Raise ``PackagingError`` unless each template has a place for each of two images between texts."""
    from ....serving.tasks.prompt.rendering import Renderer

    parts = [{"type": "image"}, {"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    renderer = Renderer(tokenizer, parts=True)
    for name, template in templates.items():
        try:
            text = renderer.text([{"role": "user", "content": parts}], template, {})
        except Exception as error:  # of the template
            raise PackagingError(f"chat_template {name!r} does not take images: {reason(error)}") from None
        found = tokenizer(text, add_special_tokens=False)["input_ids"].count(spec.placeholder_id)
        if found != 2:
            raise PackagingError(f"chat_template {name!r} writes {found} places for two images")


class _Probe:
    """A probe that asks a processor for the tokens of images."""

    def __init__(self, processor: Any, config: Any) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        image_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if not isinstance(image_id, int) or not 0 <= image_id < 2**31:
            raise PackagingError(f"model: the image_token_id of config.json is {shown(image_id)}; expected a token id")
        self.image_id, self.problem = image_id, ""
        self.placeholder = self._placeholder()

    def _placeholder(self) -> str:
        """Return the token that a template writes for an image: usually the one that stands for its vectors, too."""
        names = [getattr(self.processor, name, None) for name in ("boi_token", "image_token")]
        for name in (*names, self.tokenizer.convert_ids_to_tokens(self.image_id)):
            text = getattr(name, "content", name)
            if isinstance(text, str) and len(self._encoded(text)) == 1 and self._takes(text):
                return text
        why = f": {self.problem}" if self.problem else ""
        raise PackagingError(f"model: its processor takes no single token as the place of an image{why}")

    def _takes(self, text: str) -> bool:
        try:
            return self.image_id in self._asked(text, [(64, 64)])
        except Exception as error:  # it raises anything for a text without its placeholder
            self.problem = reason(error)
            return False

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _asked(self, text: str, sizes: list[Size]) -> list[int]:
        from PIL import Image

        from ....serving.engine.models.image_processor import inputs_of

        given = inputs_of(self.processor, text, [Image.new("RGB", size) for size in sizes])
        return list(given["input_ids"][0].tolist())

    def ids(self, size: Size) -> tuple[int, ...]:
        return tuple(self._asked(self.placeholder, [size]))

    def fixed(self) -> ImageSpec | None:
        """Return the layout in which every image has the same tokens; None if they depend on its size."""
        found = {self.ids(size) for size in SIZES}
        if len(found) > 1:
            return None
        return ImageSpec(placeholder_id=self._encoded(self.placeholder)[0], image_id=self.image_id, ids=found.pop())

    def grid(self) -> ImageSpec | None:
        """Return the layout of Idefics 3 and SmolVLM; None if this processor has not the parts of theirs."""
        processor, images = self.processor, self.processor.image_processor
        longest, tile = _edge(getattr(images, "size", None)), _edge(getattr(images, "max_image_size", None))
        around = getattr(processor, "fake_image_token", None)
        count = getattr(processor, "image_seq_len", None)
        if not (longest and tile and isinstance(around, str) and isinstance(count, int)):
            return None
        whole = str(getattr(processor, "global_image_tag", None) or getattr(processor, "global_image_token", ""))
        maximum = max(-(-longest // tile), 1)
        if maximum > MAX_TILES_PER_ROW:
            raise PackagingError(
                f"model: its processor cuts images into {maximum} x {maximum} tiles; at most {MAX_TILES_PER_ROW}"
            )
        inner = (self.image_id,) * count
        once = (*self._encoded(around + whole), *inner, *self._encoded(around))
        return ImageSpec(
            placeholder_id=self._encoded(self.placeholder)[0],
            image_id=self.image_id,
            layout="grid",
            ids=inner,
            longest_edge=longest,
            tile=tile,
            tile_heads=tuple(
                tuple(tuple(self._encoded(f"{around}<row_{row + 1}_col_{column + 1}>")) for column in range(maximum))
                for row in range(maximum)
            ),
            row_end=tuple(self._encoded("\n")),
            whole=(*self._encoded("\n\n"), *once),
            single=once,
        )

    def agrees(self, spec: ImageSpec, sizes: tuple[Size, Size]) -> bool:
        """Return whether ``spec`` gives the tokens that the processor gives, for two images within a text."""
        text = self.placeholder.join(AROUND)
        found, _ = expanded(self._encoded(text), sizes, spec, self.image_id, numbered=False)
        return list(found) == self._asked(text, list(sizes))


def _pairs() -> Iterator[tuple[Size, Size]]:
    draw = random.Random(0)
    drawn = [(draw.randint(1, MAX_DRAWN_SIDE), draw.randint(1, MAX_DRAWN_SIDE)) for _ in range(NUM_DRAWN)]
    sizes = [*SIZES, *drawn]
    return zip(sizes, reversed(sizes), strict=True)


def _edge(size: Any) -> int:
    found = size.get("longest_edge") if isinstance(size, dict) else getattr(size, "longest_edge", None)
    return found if isinstance(found, int) else 0
