"""Images in prompts: the tokens are those of transformers' ``generate``, however the prompt is computed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_vision
import torch
from engine_runs import Outcome, checked_cores, run, take
from PIL import Image
from tiny_models import prompt_of, request_of
from transformers import GenerationConfig

from mlflow_llm.flavors.llm.save.images import image_spec
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.events import Failed
from mlflow_llm.serving.interface.request import Beams, PromptTable, RequestImage, Sampling, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.model_files.image_layout import expanded

MAX_TOKENS = 12
SIZES = ((40, 30), (17, 90))
TEXT = "Look: <image> and <image>\nwhat?"


class Served:
    """A vision-language model with its processor, and its expected texts."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.model = tiny_vision.save(family, folder)
        self.processor = tiny_vision.processor_of(family)
        self.spec = image_spec(folder, folder, self.model.config)
        self.bundle = Bundle(
            content_hash=family, tasks=("chat", "completions"), model_dir=str(folder), tokenizer_dir=str(folder),
            images=self.spec,
        )  # fmt: skip

    def core(self, **settings: Any) -> EngineCore:
        more = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24, **settings}
        return EngineCore(self.bundle, EngineSettings(**more))

    def images(self, seed: int = 0, sizes: Any = SIZES) -> list[Any]:
        draw = np.random.default_rng(seed)
        return [Image.fromarray(draw.integers(0, 256, (high, wide, 3), dtype=np.uint8)) for wide, high in sizes]

    def request(self, name: str, images: list[Any], text: str = TEXT, **more: Any) -> ValidRequest:
        sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **more.pop("sampling", {})}
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        vocab_size = self.model.config.text_config.vocab_size
        prompt, counts = expanded(ids, [image.size for image in images], self.spec, vocab_size)
        images = tuple(
            RequestImage(width=image.width, height=image.height, data=image.tobytes(), num_tokens=count)
            for image, count in zip(images, counts, strict=True)
        )
        given = request_of(name, prompt, n=more.pop("n", 1))
        return msgspec.structs.replace(given, images=images, sampling=Sampling(**sampling), **more)

    @torch.inference_mode()
    def expected(self, images: list[Any], text: str = TEXT, *, model: Any = None, **more: Any) -> list[list[int]]:
        given = self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        config = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None, **more)
        found = (model or self.model).generate(**given, generation_config=config)[:, given["input_ids"].shape[1] :]
        return [row.tolist() for row in found]


@pytest.fixture(scope="module", params=list(tiny_vision.FAMILIES))
def any_served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("idefics3", tmp_path_factory.mktemp("served"))


@pytest.fixture
def core_of(served: Served) -> Any:
    with checked_cores(served.core) as make:
        yield make


def reads(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the pieces that are encoded from now on."""
    assert core.image_features is not None
    reader, sizes = core.image_features.reader, []
    real = type(reader).read

    def counted(piece: Any) -> Any:
        found = real(reader, piece)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(reader, "read", counted)
    return sizes


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("budget", [16, 512])
def test_tokens_are_those_of_generate(any_served: Served, kernels: str, budget: int) -> None:
    """Greedy tokens are those of transformers' ``generate`` for every model, kernel and chunk size."""
    core = any_served.core(kernels=kernels, max_num_batched_tokens=budget)
    assert core.info.capabilities.images
    for seed in (0, 1):
        images = any_served.images(seed)
        found = run(core, any_served.request(f"r{seed}", images))[f"r{seed}"]
        assert [found.tokens[0]] == any_served.expected(images)
    core.check_integrity()
    core.close()


def test_images_matter(served: Served) -> None:
    """The reference texts of two sets of images differ, so comparing with them is a real check."""
    assert served.expected(served.images(0)) != served.expected(served.images(1))


def test_other_types_run(any_served: Served) -> None:
    """The decoder runs in bfloat16 and int8, in which tokens may differ from float32's."""
    images = any_served.images()
    for settings in ({"quantization": "int8"}, {"dtype": "bfloat16", "kernels": "torch"}):
        core = any_served.core(**settings)
        assert len(run(core, any_served.request("r", images))["r"].tokens[0]) == MAX_TOKENS
        core.close()


def test_requests_beside_each_other(served: Served, core_of: Any) -> None:
    """Requests with images and a plain one have the tokens beside each other that each has alone."""
    core = core_of()
    given = [served.images(seed) for seed in range(4)]
    requests = [served.request(f"r{i}", images) for i, images in enumerate(given)]
    alone = request_of("text", prompt_of(20, 3))
    found = run(core, *requests, alone)
    for i, images in enumerate(given):
        assert [found[f"r{i}"].tokens[0]] == served.expected(images)
    assert found["text"].tokens == run(core_of(), alone)["text"].tokens


def test_features_are_kept_for_the_same_salt(served: Served, core_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and prefixes are reused under the same salt, and not under another salt or without one."""
    core, images = core_of(), served.images()
    sizes, wanted = reads(core, monkeypatch), served.expected(images)
    first = run(core, served.request("a", images, cache_salt="one"))["a"]
    once = len(sizes)
    assert once == sum(len(core.image_features.reader.pieces(one)) for one in served.request("x", images).images) > 2
    again = run(core, served.request("b", images, cache_salt="one"))["b"]
    assert len(sizes) == once
    assert [first.tokens[0]] == [again.tokens[0]] == wanted
    assert again.finished[0].num_cached_tokens > 0  # its prefix, too
    other = run(core, served.request("c", images, cache_salt="two"))["c"]
    assert len(sizes) == 2 * once
    assert other.finished[0].num_cached_tokens == 0
    for name in ("d", "e"):  # without a salt nothing is shared
        assert [run(core, served.request(name, images, cache_salt=None))[name].tokens[0]] == wanted
    assert len(sizes) == 4 * once


def test_another_image_shares_no_vector(served: Served, core_of: Any) -> None:
    """A request with other images under the same salt reuses KV only up to the first image."""
    core = core_of()
    for seed in (0, 1):
        images = served.images(seed)
        request = served.request(f"r{seed}", images, cache_salt="one")
        found = run(core, request)[f"r{seed}"]
        assert [found.tokens[0]] == served.expected(images)
        ids = np.array(request.sequences[0].prompt_token_ids)
        before = int((ids >= served.model.config.text_config.vocab_size).argmax())
        assert found.finished[0].num_cached_tokens <= before


def test_a_image_twice_is_read_once(served: Served, core_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that occurs twice in a prompt is encoded once for each salt."""
    core, (one, _) = core_of(), served.images()
    sizes = reads(core, monkeypatch)
    found = run(core, served.request("a", [one, one]), served.request("b", [one, one], cache_salt="s"))
    assert [found["a"].tokens[0]] == [found["b"].tokens[0]] == served.expected([one, one])
    assert sum(sizes) == 2 * served.request("x", [one, one]).images[0].num_tokens  # once for each salt


def test_the_budget_keeps_the_latest(served: Served, core_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder cache evicts the least recently used features, stays within its bytes and is off at 0."""
    images = [served.images(seed)[:1] for seed in range(3)]
    text = "a <image>"
    size = 4 * 64 * served.request("x", images[0], text).images[0].num_tokens
    core = core_of(encoder_cache=2 * size)
    sizes = reads(core, monkeypatch)

    def read_again(seed: int) -> bool:
        before = len(sizes)
        run(core, served.request(f"r{len(sizes)}-{seed}", images[seed], text, cache_salt="s"))
        return len(sizes) > before

    assert [read_again(seed) for seed in (0, 1, 0, 2, 0, 1)] == [True, True, False, True, False, True]
    assert core.image_features.num_bytes <= 2 * size
    off = core_of(encoder_cache=0)
    sizes = reads(off, monkeypatch)
    for name in ("a", "b"):
        run(off, served.request(name, images[0], text, cache_salt="s"))
    assert not off.image_features.kept


def test_other_texts_go_on_while_images_are_read(served: Served, core_of: Any) -> None:
    """A text request generates a token for each piece of an image that is encoded meanwhile."""
    core = core_of()
    outcomes = {"text": Outcome(), "r": Outcome()}
    core.add(msgspec.structs.replace(request_of("text", prompt_of(5, 1)), sampling=Sampling(max_tokens=64)))
    take(core, outcomes, max_steps=2)
    request = served.request("r", served.images())
    pieces = sum(len(core.image_features.reader.pieces(one)) for one in request.images)
    core.add(request)
    text = core.parts.scheduler.running[0]
    before = text.num_generated
    for _ in range(pieces - 1):
        take(core, outcomes, max_steps=1)
        assert core.parts.scheduler.waiting_for()["images"] == 1
    assert text.num_generated >= before + pieces - 1  # one for each piece
    take(core, outcomes)
    assert [outcomes["r"].tokens[0]] == served.expected(served.images())


def test_a_request_that_leaves_while_its_images_are_read(served: Served, core_of: Any) -> None:
    """Requests aborted or past their deadline while images are encoded end so; another one is unaffected."""
    core, outcomes = core_of(), {name: Outcome() for name in ("gone", "late", "stays")}
    core.add(served.request("gone", served.images(1)))
    core.add(served.request("late", served.images(2), deadline=time.monotonic() - 1))
    core.add(served.request("stays", served.images(0)))
    take(core, outcomes, max_steps=1)
    core.abort("gone")
    take(core, outcomes)
    assert outcomes["gone"].finished[0].reason == "abort"
    assert outcomes["late"].finished[0].reason == "deadline"
    assert [outcomes["stays"].tokens[0]] == served.expected(served.images(0))


def test_closing_while_images_are_read(served: Served) -> None:
    """Closing the engine fails a request whose images are being encoded with shutting_down."""
    core = served.core()
    core.add(served.request("r", served.images()))
    core.step()
    assert [event.kind for _, _, event in core.close()] == ["shutting_down"]


def test_a_image_that_cannot_be_read_fails_its_requests_alone(
    served: Served, core_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image whose encoding fails fails its own requests with a generic message; others are answered."""
    core, bad, good = core_of(), served.images(1), served.images(0)
    reader = core.image_features.reader
    real = type(reader).pieces

    def pieces(image: RequestImage) -> Any:
        if image.data == bad[1].tobytes():
            raise RuntimeError("what it says is not for callers")
        return real(reader, image)

    monkeypatch.setattr(reader, "pieces", pieces)
    given = [served.request("a", bad, cache_salt="s"), served.request("b", bad, cache_salt="s")]
    found = run(core, *given, served.request("c", good))
    for name in ("a", "b"):
        failed = found[name].failed
        assert isinstance(failed, Failed)
        assert failed.kind == "internal"
        assert "callers" not in failed.message
    assert [found["c"].tokens[0]] == served.expected(good)


@pytest.mark.parametrize("grammar_first", [True, False])
def test_with_a_grammar(served: Served, core_of: Any, grammar_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request begins when both its grammar is compiled and its images are encoded."""
    core = core_of()
    grammar = Grammar(source="start: /[ab]{3,12}/", field="grammar")
    images, sampling = served.images(), {"grammar": grammar, "stop_token_ids": (1,)}
    if grammar_first:
        run(
            core,
            msgspec.structs.replace(
                request_of("g", prompt_of(4, 1)), sampling=Sampling(max_tokens=4, grammar=grammar, stop_token_ids=(1,))
            ),
        )
    found = run(core, served.request("r", images, sampling=sampling))["r"]
    assert found.failed is None
    text = served.processor.tokenizer.decode(found.tokens[0], skip_special_tokens=True)
    assert set(text) <= {"a", "b"}
    assert len(text) >= 3


def test_beams(served: Served, core_of: Any) -> None:
    """Beam searches over prompts with images give the texts of transformers' ``generate``."""
    core, images = core_of(), served.images()
    sampling = {"beams": Beams(width=3)}
    found = run(core, served.request("r", images, n=2, sampling=sampling))["r"]
    wanted = served.expected(images, num_beams=3, num_return_sequences=2)
    assert [found.tokens[0], found.tokens[1]] == wanted


def test_choices_and_continuation(served: Served, core_of: Any) -> None:
    """A resumed request with images continues its text, and choices of one prompt are equal when greedy."""
    core, images = core_of(), served.images()
    whole = run(core, served.request("r", images, sampling={"temperature": 1.0}))["r"].tokens[0]
    request = served.request("s", images, sampling={"temperature": 1.0})
    resumed = msgspec.structs.replace(request.sequences[0], resumed_token_ids=tuple(whole[:5]))
    outcomes = {"s": Outcome()}
    core.add(msgspec.structs.replace(request, sequences=(resumed,)), continues=True)
    take(core, outcomes)
    assert whole[:5] + outcomes["s"].tokens[0] == whole
    both = run(core, served.request("t", images, n=2))["t"]
    assert [both.tokens[0], both.tokens[1]] == 2 * served.expected(images)


def refusal(core: EngineCore, request: ValidRequest) -> Failed:
    failed = run(core, request)[request.request_id].failed
    assert isinstance(failed, Failed)
    return failed


def test_refusals(served: Served, core_of: Any, tiny_bundle: Bundle) -> None:
    """Images of the wrong size, missing images, prompt tables beside images and text models are refused."""
    core, images = core_of(), served.images()
    given = served.request("r", images)
    cut = msgspec.structs.replace(given.images[0], data=given.images[0].data[1:])
    for request, said in (
        (msgspec.structs.replace(given, images=(cut, given.images[1])), "40 x 30 pixels of 3 bytes"),
        (msgspec.structs.replace(given, images=given.images[:1]), "token ids from 0 to"),
        (msgspec.structs.replace(given, prompt_table=PromptTable(data=bytes(256), num_tokens=1)), "reads no images"),
    ):
        failed = refusal(core, request)
        assert failed.kind == "invalid_field"
        assert said in failed.message
    text = EngineCore(tiny_bundle, EngineSettings(kv_cache_memory=1 << 24))
    assert "reads no images" in refusal(text, given).message
    text.close()


def test_a_processor_that_disagrees_fails_the_request(served: Served, core_of: Any) -> None:
    """A request whose image takes another number of tokens than its prompt has fails as internal."""
    core, given = core_of(), served.request("r", served.images())
    other = tuple(
        msgspec.structs.replace(one, num_tokens=one.num_tokens + change)
        for one, change in zip(given.images, (1, -1), strict=True)
    )
    assert refusal(core, msgspec.structs.replace(given, images=other)).kind == "internal"


def test_a_model_with_attention_in_both_directions_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that attends in both directions within images is refused, because its logits differ."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Model

    real = Idefics3Model.forward

    def forward(self: Any, *args: Any, **more: Any) -> Any:
        ids = more.get("input_ids")
        if ids is not None and (ids == served.spec.image_id).any():
            more["position_ids"] = torch.arange(ids.shape[1])[None] // 2
        return real(self, *args, **more)

    monkeypatch.setattr(Idefics3Model, "forward", forward)
    with pytest.raises(PackagingError, match="does not compute tokens of images like others"):
        served.core()


def test_prefixes_are_shared_up_to_the_first_other_image(served: Served, core_of: Any) -> None:
    """A conversation that adds images reuses the KV before them."""
    core, (one, two) = core_of(), served.images()
    words = "A text of some length that comes before: "
    for name, images, text in (
        ("t", [], words),
        ("a", [one], f"{words}<image> is"),
        ("b", [one, two], f"{words}<image> is <image>"),
    ):
        found = run(core, served.request(name, images, text, cache_salt="s"))[name]
        assert images == [] or [found.tokens[0]] == served.expected(images, text)
        shared = {
            "t": 0,
            "a": len(words),
            "b": len(words) + len(served.request("x", [one], "<image> is").sequences[0].prompt_token_ids),
        }
        assert found.finished[0].num_cached_tokens >= shared[name] - 1


def test_ids_begin_again_before_they_are_too_large(
    served: Served, core_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of images restart before they exceed their limit, and texts stay right."""
    core, vocab_size = core_of(), served.model.config.text_config.vocab_size
    monkeypatch.setattr("mlflow_llm.serving.engine.requests.image_features.MAX_IDS", vocab_size + 120)
    for name, seed in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        images = served.images(seed)
        assert [run(core, served.request(name, images, cache_salt="s"))[name].tokens[0]] == served.expected(images)
    assert core.image_features.epoch >= 1


def test_an_adapter_trained_on_the_whole_model(any_served: Served, tmp_path: Path) -> None:
    """An adapter trained on the vision-language model applies to the engine's decoder."""
    from peft import LoraConfig, get_peft_model

    targets = r".*(language_model|text_model).*\.(q_proj|down_proj)"
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    tuned = get_peft_model(tiny_vision.make_model(any_served.family), config).eval()
    tuned.save_pretrained(tmp_path / "tuned")
    core, images = any_served.core(), any_served.images()
    core.load_adapter("tuned", str(tmp_path / "tuned"))
    found = run(core, any_served.request("r", images, adapter="tuned"), any_served.request("b", images))
    wanted = any_served.expected(images, model=tuned)
    assert [found["r"].tokens[0]] == wanted != any_served.expected(images) == [found["b"].tokens[0]]
    core.close()


def test_tenants_take_turns(served: Served, core_of: Any) -> None:
    """A tenant with one image does not wait for all images of a tenant with many requests."""
    core = core_of(max_num_seqs=16)
    for i in range(6):
        core.add(served.request(f"many{i}", served.images(i), tenant="a"))
    one = served.images(9)[:1]
    core.add(served.request("one", one, "a <image>", tenant="b"))
    outcomes = {name: Outcome() for name in ("one", *(f"many{i}" for i in range(6)))}
    pieces = [len(core.image_features.reader.pieces(p)) for p in served.request("x", one, "a <image>").images]
    longest = max(len(core.image_features.reader.pieces(p)) for p in served.request("x", served.images()).images)
    take(core, outcomes, max_steps=sum(pieces) + longest)  # its own, and the image that was begun
    assert "one" not in core.image_features
    assert sum(f"many{i}" in core.image_features for i in range(6)) >= 5
    take(core, outcomes)
    for i in range(6):
        assert [outcomes[f"many{i}"].tokens[0]] == served.expected(served.images(i))
    assert [outcomes["one"].tokens[0]] == served.expected(one, "a <image>")


def test_provisioned_requests_come_first(served: Served, core_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a provisioned text, images of others are encoded for a small share of the time; its own are not
    delayed."""
    core, clock = core_of(), [1000.0]
    monkeypatch.setattr("mlflow_llm.serving.engine.requests.image_features.time.monotonic", lambda: clock[0])
    sizes = reads(core, monkeypatch)
    reader = core.image_features.reader
    real = reader.read

    def slow(piece: Any) -> Any:
        clock[0] += 1.0
        return real(piece)

    monkeypatch.setattr(reader, "read", slow)
    text = msgspec.structs.replace(request_of("text", prompt_of(5, 1)), sampling=Sampling(max_tokens=60))
    outcomes = {name: Outcome() for name in ("text", "other", "own")}
    core.add(msgspec.structs.replace(text, provisioned=True))
    take(core, outcomes, max_steps=2)
    core.add(served.request("other", served.images(1)))
    take(core, outcomes, max_steps=6)
    assert len(sizes) == 1  # the clock stands still otherwise
    clock[0] += 16.5
    take(core, outcomes, max_steps=6)
    assert len(sizes) == 2
    core.add(served.request("own", served.images(0), provisioned=True))
    take(core, outcomes, max_steps=14)
    assert "own" not in core.image_features
    assert "other" in core.image_features
    core.abort("text")
    take(core, outcomes)
    for name, seed in (("own", 0), ("other", 1)):
        assert [outcomes[name].tokens[0]] == served.expected(served.images(seed))


def test_thin_images_are_refused(served: Served, core_of: Any) -> None:
    """An image with an extreme aspect ratio is refused with its size."""
    given = served.request("r", served.images(0, ((51, 1), (50, 1))))
    assert "51 x 1" in refusal(core_of(), given).message
