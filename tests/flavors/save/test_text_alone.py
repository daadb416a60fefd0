"""The text of models of several modalities: logged alone on request, and named where their images are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
import transformers as tf
from flavor_models import byte_tokenizer
from mlflow.exceptions import MlflowException

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.model.bundle_reader import read_bundle

TEXT: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
IMAGE = {"image_token_id": 265, "video_token_id": 266, "vision_start_token_id": 267, "vision_end_token_id": 268}
CONFIGS = {
    "gemma3": lambda: tf.Gemma3Config(
        text_config=TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=265,
        boi_token_index=266,
        eoi_token_index=267,
    ),
    "mistral3": lambda: tf.Mistral3Config(
        text_config=tf.MistralConfig(**TEXT),
        vision_config=tf.PixtralVisionConfig(**VISION, head_dim=16),
        image_token_index=265,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **IMAGE,
    ),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={k: v for k, v in TEXT.items() if k != "head_dim"} | {"rope_parameters": MROPE},
        vision_config=QWEN_VISION | {"fullatt_block_indexes": [0]},
        **IMAGE,
    ),
}
PROMPT = "what is written here"


def save(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    model = tf.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def generated(model: Any, ids: list[int], tokens: int = 24) -> list[int]:
    found = model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=258
    )
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_text_alone_is_that_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Greedy tokens of the logged text are those that ``generate()`` of the whole model gives, with no processor."""
    model = save(kind, tmp_path / "source")
    llm.save_model(tmp_path / "m", tmp_path / "source", images=False)
    bundle = read_bundle(tmp_path / "m")
    assert bundle.images is None
    assert bundle.tasks == ("completions",)
    assert not (tmp_path / "m/whole").exists()
    ids = byte_tokenizer()(PROMPT).input_ids
    expected = generated(model, ids)
    alone = tf.AutoModelForCausalLM.from_pretrained(bundle.model_dir).eval()
    assert generated(alone, ids) == expected
    with llm.load_model(str(tmp_path / "m")) as served:
        answer = served.complete(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
    assert str(answer) == byte_tokenizer().decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_images_that_are_not_supported_are_refused_when_logged(tmp_path: Path, kind: str) -> None:
    """The refusal names the model and what logs its text."""
    save(kind, tmp_path / "source")
    with pytest.raises(MlflowException, match="images=False logs its text alone"):
        llm.save_model(tmp_path / "m", tmp_path / "source")
    assert not (tmp_path / "m").exists()


def test_llama_4_is_refused_by_its_layers(tmp_path: Path) -> None:
    """Attention in chunks is refused for the text alone too, when it is logged."""
    text = TEXT | {
        "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 16,
    }  # fmt: skip
    vision = VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    torch.manual_seed(0)
    config = tf.Llama4Config(text_config=text, vision_config=vision, image_token_index=265)
    tf.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    byte_tokenizer().save_pretrained(tmp_path / "source")
    for images in (None, False):
        with pytest.raises(MlflowException, match="chunked_attention"):
            llm.save_model(tmp_path / "m", tmp_path / "source", images=images)


def test_a_model_whose_images_are_read_can_be_text_alone(tmp_path: Path) -> None:
    """``images=False`` leaves out the processor of a model that would read images."""
    tiny_vision.save("llava", tmp_path / "source")
    llm.save_model(tmp_path / "m", tmp_path / "source", images=False, task="completions")
    assert read_bundle(tmp_path / "m").images is None
    assert not list((tmp_path / "m").glob("**/*processor*"))


def test_a_text_model_takes_no_such_argument(tmp_path: Path, llama_dir: Path) -> None:
    """``images`` of a model without other parts, and other values, are refused by name."""
    with pytest.raises(MlflowException, match="images: False is not allowed"):
        llm.save_model(tmp_path / "m", llama_dir, images=False)
    with pytest.raises(MlflowException, match="images: True is not allowed; expected False, or None"):
        llm.save_model(tmp_path / "m", llama_dir, images=True)
