"""Vision-language models: packaged with the layout of images in their prompts, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tiny_vision
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.errors import PackagingError
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle
from mlflow_llm.flavors.llm.model.manifest import read
from mlflow_llm.flavors.llm.save.images import image_spec
from mlflow_llm.serving.model_files.image_layout import expanded, grid


@pytest.fixture(scope="module", params=list(tiny_vision.FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_vision.save(request.param, folder)
    return folder


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    tiny_vision.save("llava", tmp_path / "llava")
    return tmp_path / "llava"


def test_saved_and_read_back(directory: Path, tmp_path: Path) -> None:
    """A saved vision-language model has its image layout in manifest and bundle, its processor's files and pillow."""
    llm.save_model(tmp_path / "saved", model=directory)
    manifest, bundle = read(tmp_path / "saved"), read_bundle(tmp_path / "saved")
    assert manifest.tasks == ("chat", "completions")
    assert manifest.format_version == 4  # earlier releases refuse it with a message
    assert bundle.images == manifest.images == image_spec(directory, directory, _config(directory))
    assert bundle.images is not None
    assert bundle.images.layout == ("fixed" if "llava" in directory.name else "grid")
    assert Path(bundle.model_dir, "processor_config.json").is_file()
    assert "pillow==" in (tmp_path / "saved/requirements.txt").read_text()


def test_a_model_object_with_its_processor(tmp_path: Path) -> None:
    """A model object takes a processor in place of a tokenizer."""
    model, processor = tiny_vision.make_model("smolvlm"), tiny_vision.processor_of("smolvlm")
    llm.save_model(tmp_path / "saved", model=model, tokenizer=processor)
    assert read_bundle(tmp_path / "saved").images is not None
    with pytest.raises(PackagingError, match=r"no preprocessor_config\.json"):
        llm.save_model(tmp_path / "other", model=model, tokenizer=processor.tokenizer)


def test_text_models_are_as_before(tiny_llama: Any, tmp_path: Path) -> None:
    """A text model is still refused for a tokenizer larger than its embedding."""
    tiny_llama.save_pretrained(tmp_path / "model")
    tiny_vision.tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(PackagingError, match="embedding has 131 rows"):
        llm.save_model(tmp_path / "saved", model=tmp_path / "model")


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_tokens_are_the_processors(family: str, tmp_path: Path) -> None:
    """The expanded image tokens equal those of transformers' processor for any sizes."""
    tiny_vision.save(family, tmp_path)
    spec, processor = image_spec(tmp_path, tmp_path, _config(tmp_path)), tiny_vision.processor_of(family)
    for sizes in [(16, 16), (17, 16)], [(48, 3), (3, 48)], [(1000, 999), (1, 200)]:
        text = "a <image>\n\n<image>b"
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        images = [Image.new("RGB", size) for size in sizes]
        found, counts = expanded(ids, sizes, spec, 1000)
        whole = processor(text=[text], images=images, add_special_tokens=False)["input_ids"][0]
        assert [3 if token_id >= 1000 else token_id for token_id in found] == list(whole)
        assert [token_id for token_id in found if token_id >= 1000] == list(range(1000, 1000 + sum(counts)))


@hypothesis.given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(48, 16), (2048, 512), (1456, 364)]))
def test_the_grid_is_that_of_transformers(width: int, height: int, sizes: tuple[int, int]) -> None:
    """The tile grid equals that of transformers' image processor."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    longest, tile = sizes
    images = Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": tile})
    _, rows, columns = images.get_number_of_image_patches(height, width, {})
    assert grid((width, height), longest, tile) == (rows, columns)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantize": "int8"}, "quantize: 'int8' is not allowed for a model that reads images"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"task": "embeddings"}, "embeddings"),
        ({"chat_template": "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"}, "0 places for two images"),
        ({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "places for two images"),
    ],
)
def test_refused_arguments(llava: Path, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    """Arguments that do not apply to vision-language models are refused, and nothing is saved."""
    with pytest.raises(PackagingError, match=said):
        llm.save_model(tmp_path / "saved", model=llava, **given)
    assert not (tmp_path / "saved").exists()


def test_refused_directories(llava: Path, tmp_path: Path) -> None:
    """A missing processor file, an unknown processor class and an invalid image token are refused with the reason."""

    def refused(said: str, **changed: Any) -> None:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(llava, folder)
        for name, change in changed.items():
            file = folder / f"{name}.json"
            file.write_text(json.dumps(change(json.loads(file.read_text())))) if change else file.unlink()
        with pytest.raises(PackagingError, match=said):
            llm.save_model(tmp_path / "saved", model=folder)

    refused("no preprocessor_config.json", processor_config=None)
    refused("its processor cannot be loaded", processor_config=lambda given: {**given, "processor_class": "NoSuch"})
    refused("image_token_id of config.json is None", config=lambda given: {**given, "image_token_id": None})
    refused("takes no single token as the place", config=lambda given: {**given, "image_token_id": 5})


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder)


def test_smolvlm_without_video_packages(tmp_path: Path) -> None:
    """SmolVLM loads without torchvision and num2words, which its processor needs only for videos."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tiny_vision.save("smolvlm", tmp_path / "hf")
    processor = tiny_vision.processor_of("smolvlm")
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}
    processor.image_processor = SmolVLMImageProcessorPil(**sizes)
    processor.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/processor_config.json"
    file.write_text(file.read_text().replace("Idefics3Processor", "SmolVLMProcessor"))
    llm.save_model(tmp_path / "saved", model=tmp_path / "hf")
    assert read_bundle(tmp_path / "saved").images == image_spec(
        tmp_path / "hf", tmp_path / "hf", _config(tmp_path / "hf")
    )


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("config", {"image_token_id": -1}, "image_token_id of config.json is -1"),
        ("config", {"image_token_id": 2**40}, "image_token_id of config.json is 1099511627776"),
        ("processor_config", {"num_additional_image_tokens": 10**6}, "num_additional_image_tokens is 1000000"),
        ("processor_config", {"patch_size": 0}, "the place of an image: "),
    ],
)
def test_impossible_processor_settings_are_refused(
    llava: Path, tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    """Impossible values in the configuration files are refused with the reason."""
    file = llava / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PackagingError, match=said):
        llm.save_model(tmp_path / "saved", model=llava)


def test_too_many_tiles(tmp_path: Path) -> None:
    """A processor that cuts images into too many tiles is refused with their number."""
    tiny_vision.save("idefics3", tmp_path / "hf")
    file = tmp_path / "hf/processor_config.json"
    given = json.loads(file.read_text())
    given["image_processor"] |= {"size": {"longest_edge": 4096}, "max_image_size": {"longest_edge": 16}}
    file.write_text(json.dumps(given))
    with pytest.raises(PackagingError, match="into 256 x 256 tiles"):
        llm.save_model(tmp_path / "saved", model=tmp_path / "hf")


def test_the_template_of_an_earlier_processor(llava: Path, tmp_path: Path) -> None:
    """A chat template in the older chat_template.json is taken."""
    (llava / "chat_template.jinja").unlink()
    (llava / "chat_template.json").write_text(json.dumps({"chat_template": tiny_vision.TEMPLATE}))
    llm.save_model(tmp_path / "saved", model=llava)
    assert read(tmp_path / "saved").tasks == ("chat", "completions")
    assert (tmp_path / "saved/chat_template.jinja").read_text() == tiny_vision.TEMPLATE
