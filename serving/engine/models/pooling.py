"""Pooling of token vectors into one vector, and the modules that the vector passes after it.

``pool`` imports torch when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...interface.bundle import POOLING_MODES as MODES
from ...interface.bundle import EmbeddingSpec, HeadModule
from ...interface.engine import EngineInfo
from ...interface.errors import PackagingError, reason

WEIGHTS = "model.safetensors"


class InputEmbedder(Protocol):
    """A model that computes one vector of each input: an embedder pools them, a cross-encoder scores them."""

    @property
    def info(self) -> EngineInfo: ...

    def embed(self, token_ids: Sequence[Sequence[int]], second_from: Sequence[int] | None = None) -> Any:
        """Return float32 [n, dim], a row for each input. From ``second_from`` on, an input's tokens are its second
        text's."""
        ...


def pooling_modes(pooling: str) -> list[str]:
    """Return the modes of ``EmbeddingSpec.pooling``. Raises ``PackagingError`` for one that is not known."""
    modes = pooling.split("+")
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise PackagingError(f"pooling {unknown[0]!r} is not supported; expected one of {', '.join(MODES)}")
    return modes


def pool(hidden: Any, lengths: Sequence[int], mode: str) -> Any:
    """Pool ``hidden`` [T, D], sequences of ``lengths`` one after another -> float32 [len(lengths), D].

    Several modes joined by ``+`` give [len(lengths), modes * D]."""
    import torch

    if "+" in mode:
        return torch.cat([pool(hidden, lengths, one) for one in pooling_modes(mode)], dim=-1)

    def sums(rows: Any) -> Any:  # one bag per sequence: adds in order like segment_reduce, and 20 times as fast
        every = torch.arange(len(rows), device=rows.device)
        return torch.nn.functional.embedding_bag(every, rows, ends - sizes, mode="sum")

    hidden = hidden.float()
    sizes = torch.tensor(list(lengths), device=hidden.device)
    ends = sizes.cumsum(0)
    if mode == "cls":
        return hidden[ends - sizes]
    if mode == "lasttoken":
        return hidden[ends - 1]
    if mode == "max":
        return torch.segment_reduce(hidden, "max", lengths=sizes)
    if mode == "weightedmean":
        weights = torch.cat([torch.arange(1, n + 1, device=hidden.device) for n in lengths])[:, None].float()
        return sums(hidden * weights) / (sizes * (sizes + 1) / 2)[:, None]
    return sums(hidden) / (sizes.float().sqrt() if mode == "mean_sqrt_len_tokens" else sizes)[:, None]


class EmbeddingHead:
    """The modules after pooling, in float32: ``head(pooled)`` with pooled [n, D] -> [n, ``dim``]."""

    def __init__(self, spec: EmbeddingSpec, model_dir: str | Path, width: int, device: Any) -> None:
        """Read the weights of the head of ``spec`` in ``model_dir``, for token vectors of ``width`` values.

        Raises ``PackagingError`` if they do not fit."""
        size = width * len(pooling_modes(spec.pooling))
        self._steps: list[Callable[[Any], Any]] = []
        for module in spec.head:
            step, size = _step(module, Path(model_dir), size, device)
            self._steps.append(step)
        self._kept = spec.truncate_dim
        if spec.truncate_dim is not None and spec.truncate_dim > size:
            raise PackagingError(
                f"truncate_dim: {spec.truncate_dim} is not allowed; expected at most {size}: the size of vectors"
            )
        self.dim = size if spec.truncate_dim is None else spec.truncate_dim
        self._last = _normalized if spec.normalize else _unchanged

    def __call__(self, pooled: Any) -> Any:
        for step in self._steps:
            pooled = step(pooled)
        return self._last(pooled if self._kept is None else pooled[:, : self._kept])


def _normalized(vectors: Any) -> Any:
    import torch

    return torch.nn.functional.normalize(vectors, dim=-1)


def _unchanged(vectors: Any) -> Any:
    return vectors


def _step(module: HeadModule, root: Path, size: int, device: Any) -> tuple[Callable[[Any], Any], int]:
    """Return the function of ``module`` for vectors of ``size`` values, and the size of what it returns."""
    if module.kind == "normalize":
        return _normalized, size
    weights = _weights(root / module.path / WEIGHTS, device)
    if module.kind == "layer_norm":
        return _layer_norm(module, weights, size)
    return _dense(module, weights, size)


def _dense(module: HeadModule, weights: dict[str, Any], size: int) -> tuple[Callable[[Any], Any], int]:
    import torch

    out = len(weights.get("linear.weight", ()))
    _check_shapes(
        module, weights, {"linear.weight": (out, size)}, {"linear.bias": (out,), "residual.weight": (out, size)}
    )
    activate = getattr(torch.nn, module.activation)()
    linear, bias, residual = weights["linear.weight"], weights.get("linear.bias"), weights.get("residual.weight")

    def step(vectors: Any) -> Any:
        found = activate(torch.nn.functional.linear(vectors, linear, bias))
        if residual is not None:
            return found + torch.nn.functional.linear(vectors, residual)
        return found + vectors if module.residual else found

    return step, out


def _layer_norm(module: HeadModule, weights: dict[str, Any], size: int) -> tuple[Callable[[Any], Any], int]:
    import torch

    _check_shapes(module, weights, {"norm.weight": (size,), "norm.bias": (size,)}, {})
    weight, bias = weights["norm.weight"], weights["norm.bias"]
    return (lambda vectors: torch.nn.functional.layer_norm(vectors, (size,), weight, bias)), size


def _check_shapes(
    module: HeadModule,
    weights: dict[str, Any],
    needed: dict[str, tuple[int, ...]],
    possible: dict[str, tuple[int, ...]],
) -> None:
    """Raise ``PackagingError`` for tensors that are missing, of another shape, or not known."""
    shapes = needed | possible
    for name in (*needed, *weights):
        found = tuple(weights[name].shape) if name in weights else None
        if found != shapes.get(name):
            expected = shapes.get(name, "no such tensor")
            raise PackagingError(f"{module.path}: {name} has shape {found}; expected {expected}")


def _weights(file: Path, device: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        return {name: tensor.float().to(device) for name, tensor in load_file(file).items()}
    except Exception as error:  # safetensors raises its own class and several others
        raise PackagingError(f"{file.parent.name}: its weights cannot be read: {reason(error)}") from None
