"""The embedder on tiny random encoders and decoders, and the reading of sentence-transformers directories."""

import json

import numpy as np
import pytest
import torch
from embedding_models import MODELS, bundle_of, saved

from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.pooling import MODES, pool
from mlflow_llm.serving.engine.models.sentence_files import read_spec
from mlflow_llm.serving.interface.bundle import EmbeddingSpec
from mlflow_llm.serving.interface.errors import ContextTooLong, PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

TEXTS = [(5, 6, 7), (9,), (8, 7, 6, 5, 4, 3, 2, 9, 10, 11, 12), (4, 4, 5), tuple(range(3, 33))]


@pytest.mark.parametrize("kind", MODELS)
def test_mixed_lengths_in_one_row_equal_each_text_alone(tmp_path, kind):
    """Encoders, shifted positions, causal decoders and windows: the flat row equals the model's own forward."""
    model = saved(tmp_path, kind)
    found = load_embedder(bundle_of(tmp_path, pooling="lasttoken"), EngineSettings()).embed(TEXTS)
    with torch.inference_mode():
        for vector, ids in zip(found, TEXTS, strict=True):
            own = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            assert np.allclose(vector, (own / own.norm()).numpy(), atol=1e-5)


def test_max_length_counts_shifted_positions_and_is_enforced(tmp_path):
    """RoBERTa of 40 positions takes 38 tokens; one more is refused."""
    saved(tmp_path, "roberta")
    embedder = load_embedder(bundle_of(tmp_path), EngineSettings())
    assert (embedder.max_length, embedder.dim, embedder.info.max_model_len) == (38, 32, 38)
    assert embedder.embed([[7] * 38]).shape == (1, 32)
    with pytest.raises(ContextTooLong):
        embedder.embed([[7] * 39])


@pytest.mark.parametrize("mode", MODES)
def test_pooling_over_a_flat_row(mode):
    """Each pooling mode equals its definition for each sequence."""
    hidden = torch.randn(7, 4)
    parts = hidden.split([2, 4, 1])
    rules = {
        "cls": lambda h: h[0],
        "lasttoken": lambda h: h[-1],
        "max": lambda h: h.amax(0),
        "mean": lambda h: h.mean(0),
        "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
        "weightedmean": lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / (len(h) * (len(h) + 1) / 2),
    }
    assert torch.allclose(pool(hidden, [2, 4, 1], mode), torch.stack([rules[mode](part) for part in parts]), atol=1e-6)


def write_sentence_transformer(folder, kinds, pooling):
    (folder / "1_Pooling").mkdir()
    modules = [
        {"type": f"sentence_transformers.models.{k}", "path": "1_Pooling" if k == "Pooling" else ""} for k in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"q": "query: "}, "default_prompt_name": "q"}'
    )


def test_read_spec(tmp_path):
    """Pooling, normalisation, length and prompts are read; a plain directory has no spec."""
    assert read_spec(tmp_path) is None
    write_sentence_transformer(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True})
    expected = EmbeddingSpec(
        pooling="cls", normalize=False, max_length=12, prompts={"q": "query: "}, default_prompt="q"
    )
    assert read_spec(tmp_path) == expected


@pytest.mark.parametrize(
    ("kinds", "pooling", "said"),
    [
        (["Transformer", "Pooling", "CNN"], {"pooling_mode_mean_tokens": True}, "CNN"),
        (["Transformer", "Pooling"], {"pooling_mode": ["mean", "median"]}, "median"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
    ],
)
def test_unsupported_modules_are_refused_by_name(tmp_path, kinds, pooling, said):
    """Other modules, unknown poolings and prompts left out of pooling are named."""
    write_sentence_transformer(tmp_path, kinds, pooling)
    with pytest.raises(PackagingError, match=said):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("normalizer", "refused"),
    [
        (None, True),
        ({"type": "BertNormalizer", "lowercase": False}, True),
        ({"type": "BertNormalizer", "lowercase": True}, False),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, False),
    ],
)
def test_lowercasing_is_done_by_the_tokenizer_or_refused(tmp_path, normalizer, refused):
    """``do_lower_case`` is never ignored: the tokenizer does it, or the directory is refused by the field's name."""
    write_sentence_transformer(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    if refused:
        with pytest.raises(PackagingError, match="do_lower_case"):
            read_spec(tmp_path)
    else:
        assert read_spec(tmp_path).max_length == 12
