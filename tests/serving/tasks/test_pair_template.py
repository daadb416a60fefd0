"""Pairs are put together as transformers' tokenizers do it."""

from __future__ import annotations

import pytest
from tiny_cross_encoders import PAIRS, tokenizer
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.errors import PackagingError
from mlflow_llm.serving.tasks.pair_template import pair_template

LENGTHS = [0, 1, 2, 3, 5, 8, 13, 21]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "xlm-roberta"])
@pytest.mark.parametrize("limit", [5, 6, 7, 12, 13, 20, 64])
def test_as_transformers_has_it(kind: str, limit: int) -> None:
    """Ids, token types and which text is cut ("longest_first"), for pairs of all lengths."""
    reference = tokenizer(kind, 64)
    template = pair_template(reference)
    typed = "token_type_ids" in reference.model_input_names
    pairs = [(" ".join(["w1"] * a), " ".join(["w2"] * b)) for a in LENGTHS for b in LENGTHS]
    for first, second in [*PAIRS, *pairs]:
        expected = reference([[first, second]], truncation="longest_first", max_length=limit)
        plain = [tuple(reference(text, add_special_tokens=False)["input_ids"]) for text in (first, second)]
        pair = template.join(*plain, limit)
        assert list(pair.token_ids) == expected["input_ids"][0], (first, second)
        types = [int(place >= pair.second_from) for place in range(len(pair.token_ids))]
        assert types == (expected["token_type_ids"][0] if typed else [0] * len(types))
        assert pair.cut == (len(plain[0]) + len(plain[1]) + template.num_special > limit)


def test_tokenizers_that_mix_pairs_are_refused() -> None:
    """A template with the second text before the first is no pair that we can put together."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[U]": 2}, unk_token="[U]"))
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$B:1 $A:0", special_tokens=[])
    with pytest.raises(PackagingError, match="does not put a pair's first text before its second"):
        pair_template(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[U]"))
