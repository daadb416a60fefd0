"""Small real tokenizers, trained here, and endpoints around them."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec
from mlflow_llm.serving.interface.engine import Capabilities, EngineInfo
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView, Profile
from mlflow_llm.serving.tasks.prompt.text import TextModel

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "user assistant system hello world STOP stop ###",
    "wörld größe 你好 世界 😀 🎉 émoji",
] * 20
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role ' + m.role + ' is unknown') }}"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def _byte_level(special=()):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|start|>", "<|end|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def _byte_fallback():
    """Return a tokenizer like SentencePiece's: spaces as U+2581, unknown characters as byte tokens."""
    letters = sorted(set("the quick brown fox jumps over lazy dog hello world"))
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        *(c for c in letters if c != " "),
    ]
    tokens += ["\u2581t", "he", "\u2581the"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _text_model(folder, tokenizer, eos="</s>", template=TEMPLATE):
    folder.mkdir()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(eos)]}))
    templates = {}
    if template is not None:
        (folder / "chat.jinja").write_text(template)
        templates = {"default": str(folder / "chat.jinja")}
    return TextModel(
        Bundle(
            content_hash="0" * 64,
            tasks=("chat", "completions"),
            model_dir=str(folder),
            tokenizer_dir=str(folder),
            chat_templates=templates,
            embedding=EmbeddingSpec(prompts={"query": "query: "}),
        )
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Return a model with byte-level BPE, a BOS, four special tokens and a chat template."""
    return _text_model(tmp_path_factory.mktemp("t") / "bytes", _byte_level())


@pytest.fixture
def text_of(tmp_path):
    """Return ``text_of(template, special=tokens)``, which makes a model like ``text`` with this template and further
    tokens.
    """
    return lambda template, special=(): _text_model(
        tmp_path / str(len(template)), _byte_level(special), template=template
    )


@pytest.fixture(scope="session")
def fallback_text(tmp_path_factory):
    """Return a model with BPE, byte fallback and no template."""
    return _text_model(tmp_path_factory.mktemp("t") / "fallback", _byte_fallback(), template=None)


@pytest.fixture(params=["text", "fallback_text"])
def any_text(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def endpoint_of(text):
    """Return ``endpoint_of(context=…, tasks=…, adapters=…, **profile fields)``, which makes an endpoint."""

    def build(context=512, tasks=("chat", "completions", "embeddings"), adapters=(), names=(), model=None, **profile):
        model = model or text
        info = EngineInfo(
            content_hash="0" * 64,
            tasks=tasks,
            vocab_size=model.vocab_size,
            max_model_len=context,
            max_num_seqs=8,
            max_kv_tokens=context,
            embedding_dim=16,
            capabilities=Capabilities(structured_output=True),
        )
        return EndpointView(
            name="m",
            info=info,
            text=model,
            adapters=adapters,
            names=names,
            profile=dataclasses.replace(Profile(), **profile),
        )

    return build


@pytest.fixture
def endpoint(endpoint_of):
    return endpoint_of()
