"""A question about an image: time to the first token, also when the conversation goes on, and what the image costs a
stream beside it. Beside transformers' ``generate`` in the same process, in turn.

No weights of a small vision-language model come as a package, so the model has the decoder of ``--model`` and a part
that reads images with random weights in the sizes of SmolVLM-256M's (SigLIP base, tiles of 512 pixels, 64 tokens a
tile): times depend on sizes, not on values. Tokens are compared all the same.

    python benchmarks/images.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import announced, say_kernels
from PIL import Image
from report import publish
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from mlflow_llm.flavors.llm.save.images import image_spec
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import RequestImage, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.model_files.image_layout import expanded

SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 16, "image_size": 512,
}  # fmt: skip
TOKENS = 16  # of an answer
END = 2  # <|im_end|>, which neither generates before its end
QUESTION = "<|im_start|>user\n<image>What is on this image?<|im_end|>\n<|im_start|>assistant\n"
MORE = "A cat.<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"


def build(source: Path, folder: Path) -> tuple[Any, Any]:
    """Write the model and return it with its processor."""
    words = AutoTokenizer.from_pretrained(source)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words.add_special_tokens({"additional_special_tokens": ["<image>", *places]})
    words.add_special_tokens({"additional_special_tokens": ["<fake_token_around_image>", "<global-img>"]})
    decoder = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    decoder.resize_token_embeddings(len(words) + 1, mean_resizing=False)
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config=decoder.config.to_dict(), vision_config=SIGLIP, scale_factor=4, tie_word_embeddings=True,
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config).eval()
    model.model.text_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    sizes = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**sizes), words, image_seq_len=64)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


class Ours:
    def __init__(self, folder: Path, processor: Any, config: Any, **settings: Any) -> None:
        self.processor, self.spec = processor, image_spec(folder, folder, config)
        bundle = Bundle(
            content_hash="benchmark", tasks=("chat", "completions"), model_dir=str(folder), tokenizer_dir=str(folder),
            images=self.spec,
        )  # fmt: skip
        self.core = announced(
            EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 30, speculation="none", **settings))
        )

    def request(self, name: str, text: str, image: Any | None, tokens: int = TOKENS) -> ValidRequest:
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        given = [] if image is None else [image]
        prompt, counts = expanded(ids, [one.size for one in given], self.spec, self.core.info.vocab_size)
        images = tuple(
            RequestImage(width=one.width, height=one.height, data=one.tobytes(), num_tokens=count)
            for one, count in zip(given, counts, strict=True)
        )
        return ValidRequest(
            request_id=name, task="completions", model="bench", sequences=(Sequence(prompt_token_ids=prompt),),
            sampling=Sampling(max_tokens=tokens, min_tokens=tokens, temperature=0.0, stop_token_ids=(END,)),
            stream=True, cache_salt="bench", images=images,
        )  # fmt: skip

    def ask(self, name: str, text: str, image: Any) -> tuple[float, list[int]]:
        """Return the seconds to the first token, and the tokens."""
        began, first = time.perf_counter(), 0.0
        found: list[int] = []
        self.core.add(self.request(name, text, image), b"bench")
        while True:
            for _, _, event in self.core.step():
                if isinstance(event, Tokens):
                    first = first or time.perf_counter() - began
                    found += event.token_ids
                elif isinstance(event, Finished):
                    return first, found

    def gaps_beside(self, image: Any) -> tuple[float, float]:
        """Return the seconds between two tokens of a stream: the median alone, and the longest beside an image."""
        self.core.add(self.request("stream", "<|im_start|>user\nTell me a long story.", None, tokens=2000), b"bench")
        alone = self._gaps(lambda steps, _: steps > 60)
        self.core.add(self.request("beside", QUESTION, image, tokens=1), b"bench")
        beside = self._gaps(lambda _, ended: "beside" in ended)
        self.core.abort("stream")
        while self.core.has_work():
            self.core.step()
        return statistics.median(alone[20:]), max(beside)

    def _gaps(self, over: Any) -> list[float]:
        gaps, last, steps = list[float](), time.perf_counter(), 0
        ended: set[str] = set()
        while not over(steps, ended):
            steps += 1
            for _, name, event in self.core.step():
                if isinstance(event, Finished):
                    ended.add(name)
                elif isinstance(event, Tokens) and name == "stream":
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last = now
        return gaps


@torch.inference_mode()
def theirs(model: Any, processor: Any, text: str, image: Any, tokens: int) -> tuple[float, list[int]]:
    began = time.perf_counter()
    given = processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
    config = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=END, eos_token_id=END
    )
    found = model.generate(**given, generation_config=config)
    return time.perf_counter() - began, found[0, given["input_ids"].shape[1] :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="images")
    args = parser.parse_args()
    say_kernels()
    draw, rows = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as name:
        model, processor = build(args.model, Path(name))
        for kind in ("none", "int8"):
            ours = Ours(Path(name), processor, model.config, quantization=kind)
            times: dict[str, list[float]] = {"first": [], "again": [], "generate": []}
            for i in range(args.rounds):
                image = Image.fromarray(draw.integers(0, 256, (768, 1024, 3), dtype=np.uint8))
                first, tokens = ours.ask(f"{i}", QUESTION, image)
                times["first"].append(first)
                times["again"].append(ours.ask(f"{i} again", QUESTION + MORE, image)[0])
                times["generate"].append(theirs(model, processor, QUESTION, image, 1)[0])
                if i == 0 and kind == "none" and theirs(model, processor, QUESTION, image, TOKENS)[1] != tokens:
                    raise SystemExit("the tokens are not those of generate()")
            fresh = Image.fromarray(draw.integers(0, 256, (768, 1024, 3), dtype=np.uint8))
            alone, longest = ours.gaps_beside(fresh)
            first, again, peer = (statistics.median(times[key]) for key in ("first", "again", "generate"))
            rows.append(
                {
                    "quantization": kind, "first token, s": first, "of generate()": first / peer,
                    "generate(), s": peer, "next turn, s": again, "next turn of generate()": again / peer,
                    "gap alone, ms": 1000 * alone, "longest gap beside, ms": 1000 * longest,
                }
            )  # fmt: skip
            ours.core.close()
    publish(args.name, rows)


if __name__ == "__main__":
    main()
