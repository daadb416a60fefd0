"""Products of few rows by our kernels: equal to torch's, and computed by whichever of the two is faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES, make_model

from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.weights import few_rows, linear
from mlflow_llm.serving.engine.weights.few_rows import FORMS, FewRowsWeight, Form
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.engine.weights.weight_layouts import PlainWeight
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
SPLIT = Form(64, 128, 4, 2, 8)
SETTINGS = EngineSettings(kernels="torch", max_num_seqs=4)
WHOLE = {"in parts": SPLIT, "in tiles": Form(64, 128, 4, 2, 8, tiles=True), "a row": Form(4, 512, 2)}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run Triton's kernels, in its interpreter if there is no device, and take products as timed."""
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    monkeypatch.setattr(few_rows, "why_not_timed", lambda device, dtype: "")
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))
    few_rows.usable_forms.cache_clear()
    yield
    few_rows.usable_forms.cache_clear()


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 528), (100, 2048)])
@pytest.mark.parametrize("form", WHOLE.values(), ids=WHOLE)
def test_products_equal_those_of_torch(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every form gives torch's products of 1 to 32 rows, with widths that fill no block, with and without a bias."""
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype)
    for rows in (1, 3, 17, 32):
        if not form.fits(rows, shape[1]):
            continue
        x = random(rows, shape[1], dtype=dtype)
        for some in (None, bias):
            counters = few_rows.counters(weight, form.block_n)
            found = few_rows.multiply(x, weight, some, form, counters)
            wanted = F.linear(x.float(), weight.float(), None if some is None else some.float())
            assert found.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 0.01
            torch.testing.assert_close(
                found.float(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
            )
            assert not counters.any()


def test_a_row_has_the_same_bits_among_others() -> None:
    """K is split into the same parts, which are added in order, for any number of rows of one block."""
    weight, x = random(100, 2048), random(16, 2048)
    assert SPLIT.split(100, 2048) == 4
    assert SPLIT.split(100, 512) == 1
    counters = few_rows.counters(weight, 64)
    wanted = few_rows.multiply(x, weight, None, SPLIT, counters)
    for rows in (1, 5, 16):
        assert torch.equal(few_rows.multiply(x[:rows], weight, None, SPLIT, counters), wanted[:rows])


def test_rows_that_lie_apart_are_read() -> None:
    """Parts of wider rows, as siblings have them, are multiplied too."""
    weight, x = random(48, 512), random(3, 1024)[:, 256:768]
    counters = few_rows.counters(weight, 64)
    assert torch.equal(
        few_rows.multiply(x, weight, None, SPLIT, counters),
        few_rows.multiply(x.contiguous(), weight, None, SPLIT, counters),
    )


def timing(monkeypatch: pytest.MonkeyPatch, faster: Any) -> list[int]:
    """Have products take 2 µs by torch, and 1 by our kernels if ``faster(form, rows)``, else 3; note their numbers."""
    asked: list[int] = []

    def timed(products: Any) -> float:
        first = products[0]
        if first.func is not few_rows.multiply:
            asked.append(len(first.args[0]))
            return 2.0
        return 1.0 if faster(first.args[3], len(first.args[0])) else 3.0

    monkeypatch.setattr(few_rows, "timed", timed)
    return asked


def test_the_faster_product_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of rows up to the next that was timed are multiplied by its fastest form, others by torch."""
    weight = PlainWeight(random(48, 512), None)
    asked = timing(monkeypatch, lambda form, rows: (rows == 1 and form is FORMS[1]) or (rows == 4 and form.programs))
    choice = few_rows.choose([weight], 5)
    assert asked == [1, 2, 4, 8]
    found = choice.by_count()
    assert (found[0], found[1], found[2]) == (None, FORMS[1], None)
    assert found[3] is found[4] is not None
    assert found[5:] == [None] * 4
    assert choice.text == "48 x 512: 1 (1.0 µs instead of 2.0), 4 (1.0 µs instead of 2.0)"


def test_torchs_product_is_kept_where_ours_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no form is faster, a shape's weights stay torch's."""
    timing(monkeypatch, lambda form, rows: False)
    choice = few_rows.choose([PlainWeight(random(48, 512), None)], 1)
    assert choice.text == "48 x 512: none"
    assert not any(choice.by_count())


@pytest.mark.skipif(not CUDA, reason="needs a device")
@torch.inference_mode()
def test_products_are_timed_on_a_device() -> None:
    """Recorded products take some time, and forms that are chosen take less than torch."""
    choice = few_rows.choose([PlainWeight(random(512, 2048, dtype=torch.bfloat16), None) for _ in range(3)], 32)
    assert sorted(choice.forms) == [1, 2, 4, 8, 16, 32]
    assert all(min(both) > 0 for both in choice.times.values())
    for count, form in choice.forms.items():
        torchs, ours = choice.times[count]
        assert (form is not None) == (ours <= few_rows.MAX_TIME_RATIO * torchs)


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_a_model_gives_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All linears of a model, the head included, are multiplied by our kernels where they are faster, in few rows."""
    caplog.set_level("INFO")
    monkeypatch.setattr(few_rows, "FORMS", tuple(WHOLE.values()))
    timing(monkeypatch, lambda form, rows: form is WHOLE["a row"] or rows == 4)
    monkeypatch.setattr(linear, "pack_float", PlainWeight)
    model = make_model(FAMILIES["llama"]()).to(DEVICE)
    used: list[int] = []
    own = few_rows.multiply

    def noted(x: torch.Tensor, *more: Any) -> torch.Tensor:
        used.append(len(x))
        return own(x, *more)

    linears = linear.install(model, ContextHolder(), SETTINGS)
    ids = {count: torch.arange(3, 3 + count, device=DEVICE)[None] for count in (1, 3, 9)}
    wanted = {count: model(one).logits for count, one in ids.items()}
    report = few_rows.install(linears, SETTINGS, DEVICE, torch.float32)
    groups = {id(one.group): one.group for one in linears.linears.values()}.values()
    assert len(groups) == 2 * 4 + 1
    assert all(isinstance(group.packed, FewRowsWeight) for group in groups)
    assert report.reason == ""
    assert all(line in caplog.text and "1 (1.0 µs instead of 2.0)" in line for line in report.lines)
    monkeypatch.setattr(few_rows, "multiply", noted)
    for count, one in ids.items():
        torch.testing.assert_close(model(one).logits, wanted[count], rtol=1e-4, atol=1e-4)
    assert used == [1] * 9 + [3] * 9


@pytest.mark.usefixtures("_kernels")
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form whose example differs from torch's product is not timed, and the reason is reported."""
    own, right = few_rows.multiply, list(FORMS)

    def wrong(x: Any, weight: Any, bias: Any, form: Form, counters: Any) -> torch.Tensor:
        y = own(x, weight, bias, form, counters)
        return y if form in right else y.flip(1)

    monkeypatch.setattr(few_rows, "multiply", wrong)
    for form in (None, *FORMS):
        right = [one for one in FORMS if one is form]
        few_rows.usable_forms.cache_clear()
        usable, reason = few_rows.usable_forms(DEVICE, torch.float32)
        assert list(usable) == right
        assert "the product of few rows differs from the reference by" in reason
    right = []
    few_rows.usable_forms.cache_clear()
    asked = timing(monkeypatch, lambda form, rows: True)
    report = few_rows.install(linear.LinearSet(), SETTINGS, DEVICE, torch.float32)
    assert "the product of few rows differs from the reference by" in report.reason
    assert not asked


@pytest.mark.usefixtures("_kernels")
def test_what_cannot_be_timed_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """If a recording fails, torch computes the products, and the log and the report say why."""

    def failing(products: Any) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(few_rows, "timed", failing)
    monkeypatch.setattr(linear, "pack_float", PlainWeight)
    linears = linear.install(make_model(FAMILIES["llama"]()).to(DEVICE), ContextHolder(), SETTINGS)
    report = few_rows.install(linears, SETTINGS, DEVICE, torch.float32)
    assert report == few_rows.Report((), "RuntimeError: operation not permitted when stream is capturing")
    assert report.reason in caplog.text
    assert not any(isinstance(one.group.packed, FewRowsWeight) for one in linears.linears.values())


@pytest.mark.usefixtures("_kernels")
def test_nothing_is_chosen_by_time_with_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits that batch_invariant promises must be the same after a restart, whatever would be faster then."""
    asked = timing(monkeypatch, lambda form, rows: True)
    settings = EngineSettings(kernels="torch", batch_invariant=True)
    assert "batch_invariant" in few_rows.install(linear.LinearSet(), settings, DEVICE, torch.float32).reason
    assert not asked


@pytest.mark.skipif(CUDA, reason="looks at what a machine without a device does")
def test_on_cpu_nothing_is_timed() -> None:
    """Without a device torch computes all products, as in float32."""
    report = few_rows.install(linear.LinearSet(), SETTINGS, DEVICE, torch.float32)
    assert report.reason == "there is no CUDA device"
    assert few_rows.why_not_timed(torch.device("cuda"), torch.float32) == "the model is in float32"
    assert few_rows.why_not_timed(torch.device("cuda"), torch.bfloat16) == ""
