"""Pairs are put together as transformers' tokenizers do it."""

from __future__ import annotations

import pytest
from tiny_cross_encoders import PAIRS, tokenizer
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.tasks.prompt.pair_template import pair_template

LENGTHS = [0, 1, 2, 3, 5, 8, 13, 21]


@pytest.mark.parametrize("templated", [False, True])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "xlm-roberta"])
@pytest.mark.parametrize("limit", [5, 6, 7, 12, 13, 20, 64])
def test_as_transformers_has_it(kind: str, limit: int, templated: bool) -> None:
    """Ids, token types and truncation ("longest_first") of pairs of all lengths equal those of transformers."""
    reference = tokenizer(kind, 64, templated=templated)
    joined = pair_template(reference)
    typed = "token_type_ids" in reference.model_input_names
    pairs = [(" ".join(["w1"] * a), " ".join(["w2"] * b)) for a in LENGTHS for b in LENGTHS]
    for first, second in [*PAIRS, *pairs]:
        expected = reference([[first, second]], truncation="longest_first", max_length=limit)
        plain = [tuple(reference(text, add_special_tokens=False)["input_ids"]) for text in (first, second)]
        pair = joined.join(*plain, limit)
        assert list(pair.token_ids) == expected["input_ids"][0], (first, second)
        types = [int(place >= pair.second_from) for place in range(len(pair.token_ids))]
        assert types == (expected["token_type_ids"][0] if typed else [0] * len(types))
        assert pair.cut == (len(plain[0]) + len(plain[1]) + joined.num_special > limit)


def words(pair: str, *, typed: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of two words with this pair template."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[U]": 2, "[S]": 3}, unk_token="[U]"))
    backend.post_processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=[("[S]", 3)])
    names = ["input_ids", *(["token_type_ids"] if typed else []), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[U]", model_input_names=names)


def test_tokenizers_that_mix_pairs_are_refused() -> None:
    """A template with the second text before the first is refused."""
    with pytest.raises(PackagingError, match="does not put a pair's first text before its second"):
        pair_template(words("$B:1 $A:0", typed=False))


def test_types_count_for_models_that_are_told_of_them() -> None:
    """A third token type is refused if the model uses types, and ignored otherwise."""
    with pytest.raises(PackagingError, match="its token types are not first 0 and then 1"):
        pair_template(words("$A:0 $B:1 [S]:2", typed=True))
    pair = pair_template(words("$A:0 $B:1 [S]:2", typed=False)).join((0,), (1,), 8)
    assert (pair.token_ids, pair.second_from) == ((0, 1, 3), 3)
