"""Settings, each with the default that was measured or reasoned for, saved with a model and open to override."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from .checked import Checked
from .errors import InvalidField

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
NAME_ALLOWED = "1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
YEAR = 365 * 86400
PrefixSharing = Literal["tenant", "endpoint", "off"]
"""Who reuses the prompt prefixes of an endpoint's requests: the keys of a tenant (a server without keys has one), all
callers of the endpoint, or none."""
ByBackend = Annotated[dict[str, dict[str, Any]], Meta(description="an object of settings by the name of a backend")]
BackendSettings = TypeVar("BackendSettings", bound=Checked)
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=YEAR)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=YEAR)]
Bytes = Annotated[int, Meta(ge=1, le=2**62, description="a number of bytes, an integer of 1 or more")]
BytesOrZero = Annotated[int, Meta(ge=0, le=2**62, description="a number of bytes, 0 for none")]
Names = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
    Meta(max_length=1024, description="a list of names of the model's adapters"),
]
BlockSize = Literal[8, 16, 32, 64, 128, 256]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$", description="'auto', 'cpu', 'cuda' or 'cuda:N'")]


class EngineSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs a model.

    ``dtype``: "auto" is float32 on CPU, bfloat16 on CUDA. Our own kernels round weights to "bfloat16", what they
    multiply and, with AMX, keys and values; what lies between stays float32. ``quantization``: "int8" stores linear
    weights in int8 by output channel and quantises activations per token; "int4" is what a model has that was logged
    with ``quantize="int4"``; "fp8", on CUDA, stores them in float8 (e4m3) by output channel and activations so by token
    in steps of many. ``kernels``: "auto" takes our own where they were built and the processor has what they need,
    "torch" never. ``max_model_len`` None is the model's own. ``max_num_batched_tokens`` bounds a step, with a prompt in
    which all others wait; None is what this machine prefills in 0.2 s, from 64 to 1024, as it is measured when the
    model is loaded, and ``max_num_seqs`` for those that decode (512 in all where our own kernels do not run it).
    ``kv_cache_memory`` is bytes, None half of what is free at start. ``kv_cache_dtype``: "auto" keeps keys and values
    as the model computes, and in int8 beside quantised weights where our own kernels run the model. "float32" keeps
    them so for a model in float32, quantised or not; "bfloat16" in half the memory, for one that our own kernels run on
    a processor with AMX: long prompts are several times as fast, and logits differ as they do between bfloat16 and
    float32; "int8" in a quarter, with a scale of each token and head, wherever our own kernels run the model, whatever
    its weights are in. ``kv_block_size``: the KV cache is made of blocks of so many tokens, which sequences that begin
    alike have together; None is 16 on CUDA and contiguous slots on CPU, where blocks are for trying them out, with
    ``kernels`` "torch" alone. ``cuda_graphs``: "auto" records the decode steps of a few sizes as CUDA graphs at start,
    where KV is in blocks, "none" never. ``launch_ahead``: "auto" launches such a step before the tokens of the last are
    read, where every sequence only goes on by a token drawn on the device; the text is the same. ``threads`` None is
    the physical cores this process may use, by affinity and within the CPU quota of its control groups.
    ``speculation``: "auto" computes tokens ahead that an earlier place of the text suggests, where our own kernels run
    and few sequences do; the text is the same. ``draft_model``: a directory or a model URI of a smaller model of the
    same vocabulary, which is asked what may come where nothing else suggests it; its own keys and values are as for
    "auto". ``max_logits_bytes``: of the logits that one request may ask for (context and generation together), which
    the engine and its caller's process hold in memory; 0 gives none.
    ``batch_invariant``: results are bitwise the same alone and in any batch, also where they are not by themselves (by
    torch's kernels): each sequence is computed alone, and no prefix is reused (docs/determinism.md). ``max_adapters``
    bounds the LoRA adapters that have names; ``adapter_memory`` the bytes of those loaded, and of the ones that came
    with requests: what no request uses is evicted, the longest unused first and fairly between tenants, and a named one
    read from disk again when it is asked for. ``adapter_host_memory``: bytes of copies that evicted ones leave in the
    host's memory, from where they come back; None is 1 GiB beside a GPU and none on CPU. ``pinned_adapters`` of the
    model are never evicted. ``idle_timeout``: seconds an engine process outlives its last client; ``start_timeout``:
    seconds its start may take. ``packed_cache``: bytes that weights in the form that our kernels read may take in this
    user's cache directory, so that later starts map them; 0 keeps and uses none.
    ``standby``: 1 keeps a second process loaded, which takes over when the engine dies. ``backend``: settings that one
    backend alone has, by its name (``of_backend``); our own engine has none beside these. ``in_process`` runs the
    engine on a thread of this process (debugging and small tests: about half the speed, see docs/performance.md).
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Device = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    kernels: Literal["auto", "torch"] = "auto"
    compile: bool = False
    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count | None = None
    max_queued_requests: CountOrZero = 4096
    kv_cache_memory: Bytes | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    kv_block_size: BlockSize | None = None
    cuda_graphs: Literal["auto", "none"] = "auto"
    launch_ahead: Literal["auto", "none"] = "auto"
    prefix_caching: bool = True
    speculation: Literal["auto", "none"] = "auto"
    batch_invariant: bool = False
    draft_model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    max_adapters: CountOrZero = 64
    adapter_memory: Bytes = 1 << 30
    adapter_host_memory: BytesOrZero | None = None
    pinned_adapters: Names = ()
    max_logits_bytes: BytesOrZero = 64 << 20
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    trust_remote_code: bool = False
    idle_timeout: SecondsOrZero = 3.0
    stall_timeout: Seconds = 60.0
    start_timeout: Seconds = 900.0
    packed_cache: BytesOrZero = 32 << 30
    standby: Annotated[int, Meta(ge=0, le=1)] = 0
    in_process: bool = False
    backend: ByBackend = msgspec.field(default_factory=dict)

    def of_backend(self, name: str, kind: type[BackendSettings]) -> BackendSettings:
        """The settings that backend ``name`` has beside those of all engines.

        Raises ``InvalidField`` for values that ``kind`` does not allow, and for settings of any other backend."""
        for other, values in self.backend.items():
            if other != name:
                raise InvalidField(f"backend.{other}", values, f"settings of this engine alone, which is {name!r}")
        return kind.read(self.backend.get(name, {}), f"backend.{name}")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_model is not None and self.speculation == "none":
            raise InvalidField("draft_model", self.draft_model, "null with speculation none")
        if self.standby and self.in_process:
            raise InvalidField("standby", self.standby, "0 with in_process: the engine dies with its process")


def check_server_engine(values: Mapping[str, Any], parent: str = "") -> None:
    """Engine settings given to a server, which has its engines in processes. Raises ``InvalidField``."""
    if EngineSettings.read(values, parent).in_process:
        field = f"{parent}.in_process" if parent else "in_process"
        raise InvalidField(field, True, "false: it is for notebooks; a server's engines have their own processes")


def check_name(name: Any, field: str = "name", hint: str = "") -> str:
    """An endpoint's or served entity's name, which stands in URLs. Raises ``InvalidField``."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidField(field, name, f"{NAME_ALLOWED}{hint}")
    return name
