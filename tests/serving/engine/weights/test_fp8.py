"""Linears in float8: Triton's kernel and torch's products beside the reference, and an engine over them on CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_runs import run
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, make_model, prompt_of, request_of
from transformers import BertConfig, BertModel

from mlflow_llm.serving.engine.assembly import free_memory
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.weights import fp8, linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.engine.weights.stored_weights import adopted, quantization_of, refuse_other_weights
from mlflow_llm.serving.engine.weights.weight_layouts import OneDnnWeight, PlainWeight
from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FP8 = EngineSettings(quantization="fp8", kernels="torch")
NARROW = not CUDA or torch.cuda.get_device_capability() >= fp8.CAPABILITY
in_float8 = pytest.mark.skipif(not NARROW, reason="the device has no products in float8")
on_device = pytest.mark.skipif(not CUDA, reason="Triton's interpreter does not know bfloat16")
on_cpu = pytest.mark.skipif(CUDA, reason="looks at what a machine without a device does")


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run Triton's kernels, in its interpreter if there is no device."""
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    yield from _looked_at_anew()


@pytest.fixture
def _anew() -> Iterator[None]:
    yield from _looked_at_anew()


def _looked_at_anew() -> Iterator[None]:
    for known in (fp8.why_not_kernel, fp8.why_not_scaled_mm):
        known.cache_clear()
    yield
    for known in (fp8.why_not_kernel, fp8.why_not_scaled_mm):
        known.cache_clear()


def weights(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    values, scale = fp8.quantize_rows(made * torch.logspace(-2, 2, rows, device=DEVICE)[:, None])
    return values, scale.flatten()


@pytest.mark.parametrize("shape", [(48, 32), (17, 300), (100, 2100), (32, 1024)])
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_device)])
def test_the_kernel_multiplies_as_floats_do(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    """Products of rows and widths that fill no block, with and without a bias, equal those in floats."""
    values, scale = weights(*shape)
    make, rtol = torch.Generator().manual_seed(rows), 1e-2 if dtype == torch.bfloat16 else 2e-3
    x = torch.randn(rows, shape[1], generator=make).to(DEVICE, dtype)
    for bias in (None, torch.randn(shape[0], generator=make).to(DEVICE)):
        found = fp8.multiply(x, values, scale, bias)
        wanted = fp8.multiply_floats(x.float(), values, scale, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, rtol=rtol, atol=float(scale.max()))


def test_sums_of_parts_are_added_in_order() -> None:
    """With K in parts, several rows have the same bits in every run and among more rows of one block, and the counters
    are zeros again."""
    values, scale = weights(100, 2100)
    assert fp8.split_of(100, 2100) > 1
    assert fp8.split_of(100, 32) == 1
    finished = torch.zeros(fp8.num_blocks(100), dtype=torch.int32, device=DEVICE)
    x = torch.randn(16, 2100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = fp8.multiply(x, values, scale, None)
    for rows in (2, 5, 16):
        assert torch.equal(fp8.multiply(x[:rows], values, scale, None, finished), wanted[:rows])
        assert not finished.any()


@pytest.mark.parametrize("rows", [2, 17])
def test_tensor_descriptors_read_the_same(rows: int) -> None:
    """Weights that come in tiles give the same bits, with rows that fill no tile; on CPU they are read as usual."""
    values, scale = weights(100, 2048)
    x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = fp8.multiply(x, values, scale, None, in_tiles=True)
    assert torch.equal(found, fp8.multiply(x, values, scale, None, in_tiles=False))
    if not CUDA:
        assert fp8.why_not_tiles(DEVICE, torch.float32) == "the device has no tensor memory accelerator"


def test_the_kernel_reads_rows_that_lie_apart() -> None:
    """Strided rows, parts of wider ones as siblings have them, are read in place."""
    values, scale = weights(48, 32)
    x = torch.randn(3, 64, device=DEVICE)[:, 16:48]
    assert torch.equal(fp8.multiply(x, values, scale, None), fp8.multiply(x.contiguous(), values, scale, None))


@pytest.mark.parametrize("decode", ["shift", "native", pytest.param("packed", marks=on_device)])
def test_every_byte_is_its_number(monkeypatch: pytest.MonkeyPatch, decode: str) -> None:
    """All 254 numbers of e4m3fn, subnormal ones included, are decoded exactly in each way."""
    if decode == "native" and not NARROW:
        pytest.skip("the device has no instructions for float8")
    monkeypatch.setattr(fp8, "decoding", lambda device, dtype: decode)
    dtype = torch.bfloat16 if decode == "packed" else torch.float32
    codes = [code for code in range(256) if code & 0x7F != 0x7F] + [0, 0]
    values = torch.tensor(codes, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).view(16, 16)
    one = torch.eye(16, device=DEVICE, dtype=dtype)
    found = fp8.multiply(one, values, torch.ones(16, device=DEVICE), None)
    assert torch.equal(found.float(), values.float().t())
    alone = torch.cat([fp8.multiply(one[i : i + 1], values, torch.ones(16, device=DEVICE), None) for i in range(16)])
    assert torch.equal(alone, found)


def test_rows_have_scales_of_their_own() -> None:
    """Each row's largest value is 448, whatever other rows hold; a row of zeros stays zeros."""
    rows = torch.tensor([[1e-4, -1e-4], [5.0, -1000.0], [0.0, 0.0]])
    values, scale = fp8.quantize_rows(rows)
    assert values.float().tolist() == [[448, -448], [2.25, -448], [0, 0]]
    assert scale.shape == (3, 1)
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@in_float8
def test_many_rows_are_multiplied_in_float8(dtype: torch.dtype) -> None:
    """Many rows give the bfloat16 product of the weights and of the rows rounded to float8 with their own scales, close
    to the product of the unrounded rows."""
    values, scale = weights(64, 128)
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 0, 70)[:, None]
    x = x.to(DEVICE, dtype)
    found = fp8.multiply_quantized(x, values, scale, torch.zeros(64, device=DEVICE))
    assert found.dtype == dtype
    for rows, allowed in ((fp8.rounded(x), 0.005), (x.float(), 0.1)):
        wanted = fp8.multiply_floats(rows, values, scale, None)
        assert ((found.float() - wanted).norm(dim=1) < allowed * wanted.norm(dim=1)).all()
    bias = torch.full((64,), 1000.0, device=DEVICE)
    torch.testing.assert_close(fp8.multiply_quantized(x * 0, values, scale, bias).float(), bias.expand(70, -1))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("rows", [2, fp8.FEW_ROWS + 2])
def test_transposed_weights_and_inputs(rows: int) -> None:
    """Transposed weights, as GPT-2 stores them, and transposed inputs are multiplied as any other."""
    weight = fp8.Fp8Weight(torch.randn(48, 96, device=DEVICE).t(), None)
    x = torch.randn(48, rows, device=DEVICE).t()
    wanted = x @ weight.dense().t()
    assert (weight.matmul(x) - wanted).norm() < 0.1 * wanted.norm()


@in_float8
@pytest.mark.usefixtures("_kernels")
def test_the_number_of_rows_chooses_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to FEW rows go by the kernel, more by the device's products, which a self-test uses for all."""
    weight, taken = fp8.Fp8Weight(torch.randn(48, 32, device=DEVICE), None), []
    for name in ("multiply", "multiply_quantized", "multiply_floats"):
        monkeypatch.setattr(fp8, name, lambda x, *_, name=name: taken.append((name, len(x))))
    for rows in (1, fp8.FEW_ROWS, fp8.FEW_ROWS + 1):
        weight.matmul(torch.zeros(rows, 32))
    with fp8.all_rows_are_many():
        weight.matmul(torch.zeros(1, 32))
    weight.matmul(torch.zeros(1, 32))
    names = ["multiply", "multiply", "multiply_quantized", "multiply_quantized", "multiply"]
    assert [name for name, _ in taken] == names


@in_float8
@pytest.mark.usefixtures("_kernels")
def test_a_failing_or_wrong_product_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a product raises or gives something else, floats are multiplied and the reason is reported."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    own = fp8.multiply_quantized
    monkeypatch.setattr(fp8, "multiply", broken)
    monkeypatch.setattr(fp8, "multiply_quantized", lambda *given: own(*given).flip(-1))
    weight = fp8.Fp8Weight(torch.randn(48, 32, device=DEVICE), torch.randn(48, device=DEVICE))
    for rows in (2, fp8.FEW_ROWS + 2):
        x = torch.randn(rows, 32, device=DEVICE)
        torch.testing.assert_close(weight.matmul(x), x @ weight.dense().t() + weight.bias, rtol=1e-4, atol=1e-4)
    why = fp8.reason(FP8, DEVICE, torch.float32)
    assert "few rows are multiplied as floats: it does not run: RuntimeError: no compiler" in why
    assert "many rows are multiplied as floats: it differs from the reference by" in why
    assert "no compiler" in caplog.text


@pytest.mark.usefixtures("_kernels")
def test_a_product_that_is_no_number_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives NaN is not taken for one that agrees, nor is one that fails where K is split."""
    own = fp8.multiply
    monkeypatch.setattr(fp8, "multiply", lambda x, *more: own(x, *more) * (float("nan") if x.shape[1] == 1024 else 1.0))
    assert "few rows are multiplied as floats: it differs from the reference by nan" in fp8.reason(
        FP8, DEVICE, torch.float32
    )


def core_of(bundle: Bundle, **more: Any) -> EngineCore:
    own = {"quantization": "fp8", "device": "cpu", "kernels": "torch", "kv_block_size": 16, "kv_cache_memory": 1 << 24}
    return EngineCore(bundle, EngineSettings(**{**own, "max_num_seqs": 8, "max_num_batched_tokens": 128, **more}))


def logprobs(core: EngineCore, prompt: tuple[int, ...], adapter: str | None = None) -> torch.Tensor:
    """Return the log probability of every token of the prompt but the first, as the engine scores them."""
    request = request_of("scored", prompt, adapter=adapter, max_tokens=1, prompt_logprobs=0)
    return torch.tensor([one.logprob for one in run(core, request)["scored"].scored[0].logprobs if one is not None])


@on_cpu
@pytest.mark.parametrize("kernels", [False, True], ids=["by torch", "by Triton"])
def test_an_engine_is_near_floats(tiny_bundle: Bundle, request: pytest.FixtureRequest, kernels: bool) -> None:
    """Prompts of few and of many rows score close to floats but not exactly so, and the engine reports how it runs."""
    request.getfixturevalue("_kernels" if kernels else "_anew")
    exact, narrow = core_of(tiny_bundle, quantization="none"), core_of(tiny_bundle)
    assert narrow.info.quantization == "fp8"
    wanted = "" if kernels else "few rows are multiplied as floats: there is no CUDA device"
    assert narrow.info.quantization_reason == wanted
    assert exact.info.quantization_reason == ""
    for length in (20, fp8.FEW_ROWS + 20):
        prompt = prompt_of(length, 3)
        floats, found = logprobs(exact, prompt), logprobs(narrow, prompt)
        assert (found - floats).abs().mean() < 0.15 * floats.abs().mean()
        assert not torch.equal(found, floats)
    requests = [request_of(str(i), prompt_of(n, i)) for i, n in enumerate((5, 37, 1, 12))]
    texts = run(narrow, *requests)
    assert all(len(texts[one.request_id].tokens[0]) == 12 for one in requests)
    narrow.check_integrity()
    exact.close()
    narrow.close()


@on_cpu
def test_vectors_are_near(tmp_path: Path) -> None:
    """An encoder's vectors are close to those of floats."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    bundle = Bundle(
        content_hash="tiny", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="", embedding=EmbeddingSpec()
    )
    floats, narrow = (load_embedder(bundle, EngineSettings(kernels="torch", quantization=q)) for q in ("none", "fp8"))
    assert (narrow.info.quantization, narrow.info.quantization_reason[:3]) == ("fp8", "few")
    texts = [(5, 6, 7), tuple(range(3, 53))]
    similar = (floats.embed(texts) * narrow.embed(texts)).sum(-1)
    assert ((similar > 0.99) & (similar < 1)).all()


def test_memory_of_weights_that_were_packed_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cached memory is released before the free memory of the device is read."""
    held = [300]
    monkeypatch.setattr(torch.cuda, "empty_cache", held.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - sum(held), 1000))
    assert free_memory(torch.device("cuda")) == 1000


@on_cpu
def test_adapters_run_over_fp8(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """An adapter changes scores as it does over floats, beside requests without it."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(make_model(FAMILIES["llama"]()), config).save_pretrained(tmp_path)
    exact, narrow = core_of(tiny_bundle, quantization="none"), core_of(tiny_bundle)
    for core in (exact, narrow):
        core.load_adapter("a", str(tmp_path))
    for prompt in (prompt_of(20, 3), prompt_of(60, 4)):
        floats, found = (logprobs(core, prompt, "a") for core in (exact, narrow))
        plain = logprobs(narrow, prompt)
        assert (found - floats).abs().mean() < 0.15 * floats.abs().mean()
        assert (found - plain).abs().mean() > 3 * (found - floats).abs().mean()
    exact.close()
    narrow.close()


@on_cpu
def test_batch_invariant_holds(tiny_bundle: Bundle) -> None:
    """With batch_invariant log probabilities are bitwise the same alone and in a batch."""
    core = core_of(tiny_bundle, batch_invariant=True)
    requests = [request_of(str(i), prompt_of(n, i), logprobs=0) for i, n in enumerate((5, 60, 33, 12))]
    together = run(core, *requests)
    for one in requests:
        alone = run(core, one)[one.request_id]
        assert alone.tokens == together[one.request_id].tokens
        assert alone.logprobs == together[one.request_id].logprobs
    core.close()


@on_cpu
@pytest.mark.parametrize("product", ["multiply_quantized", "multiply_floats"])
def test_the_self_test_looks_at_both_products(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    """Products of few rows or of many that come out permuted are refused at load."""
    fp8.why_not_scaled_mm(torch.device("cpu"))  # the kernel's own trial would find it
    own = getattr(fp8, product)
    monkeypatch.setattr(fp8, product, lambda *given: own(*given).flip(-1))
    with pytest.raises(PackagingError, match="self-test"):
        core_of(tiny_bundle)


def test_the_head_and_gates_stay_in_float() -> None:
    """The output head and linears of a few outputs are not quantised."""
    found = linear.install(make_model(FAMILIES["llama"]()), ContextHolder(), FP8).linears
    assert isinstance(found["model.layers.0.mlp.down_proj"].group.packed, fp8.Fp8Weight)
    assert isinstance(found["lm_head"].group.packed, (PlainWeight, OneDnnWeight))
    assert not fp8.can_quantize(torch.zeros(8, 32))
    assert fp8.can_quantize(torch.zeros(17, 300))  # on CPU; a device's products want multiples of 16
    assert not fp8.can_quantize(torch.zeros(17, 300, device="meta"))


@on_cpu
def test_fp8_is_refused_with_native_kernels(tiny_bundle: Bundle) -> None:
    """fp8 with native kernels is refused with the allowed values, for generating and embedding models."""
    for tasks in (tiny_bundle.tasks, ("embeddings",)):
        with pytest.raises(PackagingError, match="expected 'none' or 'int8' on CPU with kernels auto"):
            core_of(msgspec.structs.replace(tiny_bundle, tasks=tasks), kernels="auto", kv_block_size=None)


def test_stored_weights_stay_as_they_are(tmp_path: Path) -> None:
    """A model logged in int8 refuses fp8 by name; a draft model of floats beside one in fp8 becomes fp8."""
    assert adopted(FP8, tmp_path).quantization == "fp8"
    stored = {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert adopted(FP8, tmp_path).quantization == "int8"
    with pytest.raises(PackagingError, match=r"quantization: 'fp8' is not allowed; expected 'int8'"):
        refuse_other_weights(FP8, quantization_of(tmp_path))
