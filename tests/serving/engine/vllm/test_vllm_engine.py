"""A tiny Llama in vLLM: the tokens of ``generate()``, our engine's draws, adapters, grammars, prefixes and vectors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
import transformers as tf
from engine_backends import VLLM_PYTHON, WIDE, WITHOUT_VLLM, vllm_settings
from grammar_runs import Texts, bundle_of, lark, regex, schema
from safetensors.torch import save_file
from tiny_models import greedy, make_model, prompt_of, request_of
from transformers import AutoModelForCausalLM
from transport_place import Place, by_sequence, eventually

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.errors import Conflict, InvalidField, NotFound
from mlflow_llm.serving.interface.events import Embedded, Failed, PromptScored, Tokens
from mlflow_llm.serving.interface.request import Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.transport import connect

pytestmark = pytest.mark.skipif(not VLLM_PYTHON, reason=WITHOUT_VLLM)
NUM_PROMPTS = 200


class Served:
    """A model with a tokenizer, its engine in vLLM and the model object itself."""

    def __init__(self, bundle: Bundle, engine: Any) -> None:
        self.bundle, self.engine = bundle, engine
        self.model: Any = AutoModelForCausalLM.from_pretrained(bundle.model_dir, attn_implementation="eager").eval()
        self.model.generation_config.eos_token_id = None

    def tokens(self, request: ValidRequest) -> dict[int, list[int]]:
        tokens, ends = by_sequence(self.engine.submit(request))
        assert not [end for end in ends.values() if isinstance(end, Failed)], ends
        return tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    bundle = bundle_of("byte_level", folder, hidden_size=128, head_dim=32)
    args = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    place = Place()
    try:
        with connect(bundle, vllm_settings(engine_args=args, max_num_seqs=32), state_dir=place.runtime) as engine:
            yield Served(bundle, engine)
        place.assert_clean()
    finally:
        place.close()


def adapter(base: str, folder: Path, seed: int, rank: int = 4, **more: Any) -> tuple[str, Any]:
    """Save an adapter that changes the model, and return its directory and the adapted model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    config = peft.LoraConfig(r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], **more)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(str(folder))
    adapted.generation_config.eos_token_id = None
    return str(folder), adapted


def test_greedy_texts_are_those_of_generate(served: Served) -> None:
    """200 prompts of different lengths, which run together, have the tokens of transformers' ``generate()``."""
    size = served.model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(3, size - 8, (1 + i % 40,), generator=generator).tolist()) for i in range(NUM_PROMPTS)
    ]
    streams = [served.engine.submit(request_of(f"g{i}", prompt, max_tokens=12)) for i, prompt in enumerate(prompts)]
    found = [by_sequence(stream)[0][0] for stream in streams]
    differing = [i for i, prompt in enumerate(prompts) if found[i] != greedy(served.model, prompt, 12)]
    assert differing == []


def test_a_seed_draws_what_our_engine_draws(served: Served) -> None:
    """A seed, penalties and bans give the text that they give in our own engine, since the race is the same."""
    core = EngineCore(served.bundle, EngineSettings(kv_cache_memory=1 << 24, threads=1, speculation="none"))
    try:
        for i, more in enumerate(
            (
                {"temperature": 1.0},
                {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
                {"temperature": 1.0, "typical_p": 0.7},
                {"temperature": 0.7, "presence_penalty": 0.8, "repetition_penalty": 1.2},
                {"temperature": 0.0, "bad_words": ((40,), (41, 42)), "no_repeat_ngram_size": 2},
                {"temperature": 0.0, "logit_bias": ((45, 9.0),), "min_tokens": 6, "stop_token_ids": (45,)},
            )
        ):
            request = request_of(f"d{i}", (9, 8, 7, 6), max_tokens=20, seed=11, n=2, **more)
            core.add(request, None)
            ours: dict[int, list[int]] = {}
            while core.has_work():
                for _, _, event in core.step():
                    if isinstance(event, Tokens):
                        ours.setdefault(event.index, []).extend(event.token_ids)
            assert served.tokens(request) == ours, more
    finally:
        core.close()


def test_a_prefix_is_read_once(served: Served) -> None:
    """A prompt that begins like an earlier one reuses its keys and values, and only with the same salt."""
    prompt = tuple(20 + i % 97 for i in range(300))  # vLLM's blocks on CPUs have 128 tokens
    before = served.engine.health()
    counts = []
    for name, salt in (("p0", "a"), ("p1", "a"), ("p2", "b"), ("p3", None), ("p4", None)):
        end = by_sequence(served.engine.submit(request_of(name, prompt, cache_salt=salt, max_tokens=2)))[1][0]
        counts.append(end.num_cached_tokens)
    assert counts[1] == 256
    assert counts[0] == counts[2] == counts[3] == counts[4] == 0
    assert eventually(lambda: served.engine.health().prefix_hit_tokens == before.prefix_hit_tokens + counts[1])


def test_adapters_are_applied_replaced_and_removed(served: Served, tmp_path: Path) -> None:
    """An adapter's requests have the adapted model's tokens, beside the base's; a replaced one has the new weights."""
    base = served.bundle.model_dir
    (one, adapted_one), (two, adapted_two) = adapter(base, tmp_path / "one", 1), adapter(base, tmp_path / "two", 2)
    engine, prompt = served.engine, (31, 32, 33, 34)
    try:
        assert engine.load_adapter("a", one).rank == 4
        streams = [engine.submit(request_of(f"a{i}", prompt, adapter=name)) for i, name in enumerate(("a", None))]
        found = [by_sequence(stream)[0][0] for stream in streams]
        assert found == [greedy(adapted_one, prompt, 12), greedy(served.model, prompt, 12)]
        engine.load_adapter("a", two, replace=True)
        assert served.tokens(request_of("a2", prompt, adapter="a"))[0] == greedy(adapted_two, prompt, 12)
        assert [one.name for one in engine.adapters()] == ["a"]
        stream = engine.submit(request_of("a3", prompt, adapter="a", max_tokens=300, stream=True))
        next(stream)
        with pytest.raises(Conflict):
            engine.unload_adapter("a")
        stream.close()
    finally:
        engine.unload_adapter("a", at_once=True)
    with pytest.raises(NotFound):
        engine.unload_adapter("a")


def test_an_adapter_that_does_not_fit_is_refused(served: Served, tmp_path: Path) -> None:
    """A directory without an adapter and a rank above the engine's are refused by name, and the engine goes on."""
    with pytest.raises(InvalidField, match=r"a directory with a LoRA adapter of peft"):
        served.engine.load_adapter("none", str(tmp_path))
    path, _ = adapter(served.bundle.model_dir, tmp_path / "large", 3, rank=16)
    with pytest.raises(InvalidField, match=r"large of rank 16.* up to 8"):
        served.engine.load_adapter("large", path)
    assert served.tokens(request_of("after", (5, 6), max_tokens=3))[0]


def test_texts_stay_within_their_grammar(served: Served) -> None:
    """JSON by a schema, a regular expression and a grammar hold for sampled texts, which end when they are complete."""
    texts = Texts(served.bundle)
    prompt = texts.ids("abc")
    wanted = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 10}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    cases = ((schema(wanted), r'\{"a":\d\d\}'), (regex(r"[ab]{3}-\d"), r"[ab]{3}-\d"), (lark("start: /x{4}/"), "x{4}"))
    for i, (grammar, pattern) in enumerate(cases):
        request = request_of(f"s{i}", prompt, temperature=1.0, n=3, grammar=grammar, max_tokens=60)
        tokens, ends = by_sequence(served.engine.submit(request))
        for index, ids in tokens.items():
            assert re.fullmatch(pattern, texts.of(ids)), texts.of(ids)
            assert ends[index].reason == "stop"  # type: ignore[union-attr]


def test_a_constrained_text_resumes(served: Served) -> None:
    """A text within a grammar goes on after any of its tokens as it would have."""
    request = request_of("whole", (65, 66), temperature=1.0, grammar=regex(r"[a-f]{12}"), max_tokens=40, seed=4)
    text = served.tokens(request)[0]
    for count in range(1, len(text)):
        sequence = msgspec.structs.replace(request.sequences[0], resumed_token_ids=tuple(text[:count]))
        again = msgspec.structs.replace(request, request_id=f"rest{count}", sequences=(sequence,))
        assert served.tokens(again).get(0, []) == text[count:]


def test_a_grammar_that_cannot_be_compiled_is_refused(served: Served) -> None:
    """A grammar that is not valid fails its request alone, and names its field."""
    grammar = Grammar(source="start: missing", field="guided_grammar")
    (failed,) = served.engine.submit(request_of("bad", (5,), grammar=grammar))
    assert isinstance(failed, Failed)
    assert failed.param == "guided_grammar"


def test_a_text_without_an_allowed_token_fails(served: Served) -> None:
    """A request that forbids every token fails by the name of its field."""
    size = served.engine.info.vocab_size
    (failed,) = served.engine.submit(request_of("none", (5,), bad_words=tuple((i,) for i in range(size))))
    assert isinstance(failed, Failed)
    assert failed.param == "bad_words"


def test_vllm_s_own_sampling_is_not_resumed(served: Served) -> None:
    """With ``sampling`` "vllm" the engine says that texts do not resume, and refuses what only the race does."""
    place = Place()
    settings = vllm_settings(backend={"vllm": {"sampling": "vllm"}})
    try:
        with connect(served.bundle, settings, state_dir=place.runtime) as engine:
            assert not engine.info.capabilities.resumes
            assert not engine.info.capabilities.structured_output
            found = by_sequence(engine.submit(request_of("g", (9, 8, 7))))[0][0]
            assert found == greedy(served.model, (9, 8, 7), 12)
            first, second = (
                by_sequence(engine.submit(request_of(f"v{i}", (9, 8), temperature=1.0, top_p=0.9, seed=5)))[0][0]
                for i in range(2)
            )
            assert first == second
            (failed,) = engine.submit(request_of("t", (9, 8), temperature=1.0, typical_p=0.5))
            assert isinstance(failed, Failed)
            assert failed.param == "typical_p"
        place.assert_clean()
    finally:
        place.close()


def test_vectors_are_those_of_our_engine(tmp_path: Path) -> None:
    """A model that embeds gives the vectors of our own engine."""
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=131, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    tf.BertModel(config).save_pretrained(tmp_path)
    bundle = Bundle(
        content_hash="bert", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="",
        embedding=EmbeddingSpec(pooling="mean"),
    )  # fmt: skip
    prompts = [(2, 5 + i, 9, 3)[: 2 + i % 3] for i in range(8)]
    request = ValidRequest(
        request_id="e", task="embeddings", model="m", sequences=tuple(Sequence(prompt_token_ids=p) for p in prompts)
    )
    core = EngineCore(bundle, EngineSettings(threads=1))
    core.add(request, None)
    ours: dict[int, bytes] = {}
    while core.has_work():
        ours |= {event.index: event.vector for _, _, event in core.step() if isinstance(event, Embedded)}
    core.close()
    place = Place()
    try:
        with connect(bundle, vllm_settings(), state_dir=place.runtime) as engine:
            theirs = {event.index: event.vector for event in engine.submit(request) if isinstance(event, Embedded)}
            assert engine.info.embedding_dim == 128
        place.assert_clean()
    finally:
        place.close()
    assert theirs.keys() == ours.keys()
    for index, vector in ours.items():
        np.testing.assert_allclose(np.frombuffer(theirs[index], "<f4"), np.frombuffer(vector, "<f4"), atol=1e-4)


def gptq(model: Any, folder: Path, group: int = 32) -> Any:
    """Save the linears of a Llama in GPTQ's form of 4 bits, and return the model with the weights that they mean."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = parameter.to(torch.bfloat16).contiguous()
            continue
        columns = parameter.T.contiguous()  # [in, out]
        size, width = columns.shape
        grouped = columns.view(size // group, group, width)
        scales = (grouped.abs().amax(1) / 7).to(torch.bfloat16)
        whole = (grouped / scales.float()[:, None]).round().clamp(-8, 7).to(torch.int64).view(size, width)
        packed = torch.zeros(size // 8, width, dtype=torch.int64)
        for place in range(8):
            packed |= (whole[place::8] + 8) << 4 * place
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = packed.to(torch.uint32).view(torch.int32)
        tensors[f"{stem}qzeros"] = torch.full((size // group, width // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{stem}scales"] = scales
        tensors[f"{stem}g_idx"] = (torch.arange(size) // group).to(torch.int32)
        parameter.copy_((whole.view(-1, group, width) * scales.float()[:, None]).view(size, width).T)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    form = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": form}))
    return model


def test_a_gptq_checkpoint_runs(tmp_path: Path) -> None:
    """A checkpoint of 4 bits in GPTQ's form has the scores of the weights it means."""
    model = gptq(make_model(tf.LlamaConfig(**WIDE | {"intermediate_size": 64})), tmp_path / "gptq")
    bundle = Bundle(content_hash="gptq", tasks=("completions",), model_dir=str(tmp_path / "gptq"), tokenizer_dir="")
    prompt = prompt_of(24, 3)
    request = request_of("q", prompt, max_tokens=0, prompt_logprobs=0)
    place = Place()
    try:
        with connect(bundle, vllm_settings(dtype="bfloat16"), state_dir=place.runtime) as engine:
            assert engine.info.quantization.endswith("gptq")
            (scored,) = [event for event in engine.submit(request) if isinstance(event, PromptScored)]
        place.assert_clean()
    finally:
        place.close()
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    expected = [float(wanted[i, token_id]) for i, token_id in enumerate(prompt[1:])]
    found = [score.logprob for score in scored.logprobs]
    assert np.corrcoef(found, expected)[0, 1] > 0.99  # vLLM computes in bfloat16, the other in float32
