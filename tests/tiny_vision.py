"""Vision-language models of a few thousand parameters, with real processors and a tokenizer of words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MODELS

VOCAB = 320
NEWLINE = "\u010a"  # as byte-level tokenizers write it
SPECIAL = ("<s>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a token for an empty line, as in many tokenizers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate((*SPECIAL, *TILES, *letters, 2 * NEWLINE))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[(NEWLINE, NEWLINE)]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    given = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **given)
    fast.add_special_tokens({"additional_special_tokens": [*SPECIAL[3:], *TILES]})
    return fast


def _decoder(**more: Any) -> dict[str, Any]:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip


def llava() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    return LlavaConfig(text_config=_decoder(), vision_config=vision, image_token_id=3, image_seq_length=4)


def _tiled(cls: Any) -> Any:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    return cls(text_config=_decoder(), vision_config=vision, image_token_id=3, scale_factor=2, pad_token_id=2)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llava": llava,
    "idefics3": lambda: _tiled(Idefics3Config),
    "smolvlm": lambda: _tiled(SmolVLMConfig),
}


def processor_of(family: str) -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    if family == "llava":
        images = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        return LlavaProcessor(
            images, tokenizer(), patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}
    return Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer(), image_seq_len=4)


def make_model(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    model = MODELS[type(config)](config).eval()
    with torch.no_grad():  # fresh weights are so small that no image would change a token
        for parameter in model.parameters():
            parameter.mul_(6) if parameter.dim() > 1 else None
    return model


def save(family: str, directory: Path, seed: int = 0) -> Any:
    """Write model and processor as a Hugging Face directory; return the model."""
    model = make_model(family, seed)
    model.save_pretrained(directory)
    processor_of(family).save_pretrained(directory)
    return model


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_around(source: Path, directory: Path, *, vision: dict[str, Any], tile: int, longest: int) -> Any:
    """Write an Idefics 3 model around the decoder in ``source``, whose weights are real; what reads images is random.

    Return the model. Its processor has tiles of ``tile`` pixels and images of ``longest``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    words = AutoTokenizer.from_pretrained(source, local_files_only=True)
    words.add_special_tokens({"additional_special_tokens": [*SPECIAL[3:], *TILES]})
    words.chat_template = CHATML
    decoder = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    torch.manual_seed(0)
    decoder.resize_token_embeddings(len(words), mean_resizing=False)
    text = decoder.config
    config = Idefics3Config(
        text_config=text.to_dict(), vision_config={**vision, "image_size": tile}, scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"), pad_token_id=text.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config).eval()
    model.model.text_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    model.generation_config = decoder.generation_config
    model.save_pretrained(directory)
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    tokens = (tile // vision["patch_size"] // 2) ** 2
    Idefics3Processor(Idefics3ImageProcessorPil(**sizes), words, image_seq_len=tokens).save_pretrained(directory)
    return model
