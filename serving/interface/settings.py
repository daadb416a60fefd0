"""Settings, each with a measured or reasoned default, that are saved with a model and can be overridden."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from .errors import InvalidField
from .validated_struct import Checked

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
NAME_ALLOWED = "1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first"
YEAR_SECONDS = 365 * 86400
PrefixSharing = Literal["tenant", "endpoint", "off"]
"""Who reuses the prompt prefixes of an endpoint's requests: the keys of a tenant (a server without keys has one), all
callers of the endpoint, or none."""
ByBackend = Annotated[dict[str, dict[str, Any]], Meta(description="an object of settings by the name of a backend")]
BackendSettings = TypeVar("BackendSettings", bound=Checked)
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=YEAR_SECONDS)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=YEAR_SECONDS)]
Bytes = Annotated[int, Meta(ge=1, le=2**62, description="a number of bytes, 1 or more, such as 1073741824 or 1GiB")]
BytesOrZero = Annotated[
    int, Meta(ge=0, le=2**62, description="a number of bytes, such as 1073741824 or 1GiB; 0 for none")
]
Names = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
    Meta(max_length=1024, description="a list of names of the model's adapters"),
]
BlockSize = Literal[8, 16, 32, 64, 128, 256]
Interpreter = Annotated[
    str, Meta(pattern=r"^/.*[^/]$", max_length=4096, description="the absolute path of a Python interpreter")
]
EngineArgs = Annotated[dict[str, Any], Meta(description="an object of the engine's own arguments")]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$", description="'auto', 'cpu', 'cuda' or 'cuda:N'")]


class EngineSettings(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings with which an engine runs a model.

    Attributes:
        dtype: "auto" means float32 on CPUs and bfloat16 on CUDA. With "bfloat16", the native kernels round weights, the
            inputs of products and, with AMX, keys and values; everything else stays in float32.
        device: where the model runs; "auto" takes CUDA if there is a GPU.
        quantization: "int8" stores the weights of linears in int8 with one scale per output channel, and quantises
            activations per token. "int4" is for models that were logged with ``quantize="int4"``. "fp8", on CUDA,
            stores weights in float8 (e4m3) per output channel; steps of many tokens also quantise activations so.
        kernels: "auto" uses the native kernels if they were built and the CPU supports them; "torch" never does.
        max_model_len: the most tokens of prompt and completion together; None is the model's own limit.
        max_num_seqs: the most sequences in one batch.
        max_num_batched_tokens: the most tokens in a step that has prompts, for which all other sequences wait. None is
            the number of tokens that this machine prefills in 0.2 s, measured when the model is loaded, between 64 and
            1024, plus ``max_num_seqs`` for decodes. On CUDA it is what such a device should prefill of this model in
            that time, between 512 and 8192; otherwise, without native kernels, it is 512.
        max_queued_requests: the most requests that wait in the engine; more are refused.
        kv_cache_memory: bytes of the KV cache; None is half of the memory that is free at the start.
        kv_cache_dtype: "auto" keeps keys and values in the model's type, and in int8 with quantised weights if the
            native kernels run the model. "float32" keeps them in float32. "bfloat16" takes half the memory and needs
            native kernels and AMX; long prompts are several times as fast, and logits differ as between bfloat16 and
            float32. "int8" takes a quarter, with one scale per token and head, and needs native kernels.
        kv_block_size: tokens per block of the KV cache. Sequences with the same beginning share blocks. None is 16 on
            CUDA and contiguous slots on CPUs, where blocks are only for experiments, with ``kernels`` "torch".
        cuda_graphs: "auto" captures decode steps of a few sizes as CUDA graphs at the start if KV is in blocks; "none"
            never does.
        async_scheduling: "auto" launches a decode step before the tokens of the previous one are read, if every
            sequence only continues with a token sampled on the device. The text is the same.
        prefix_caching: reuse the KV of earlier prompts with the same beginning.
        speculation: "auto" uses speculative decoding with the native kernels when few sequences run. The text is the
            same.
        batch_invariant: results are bitwise the same alone and in any batch, even with torch's kernels: each sequence
            is then computed alone, and no prefix is reused. The native kernels do not need it.
        draft_model: directory or model URI of a smaller model with the same vocabulary, which proposes tokens for
            speculative decoding when no other source does. Its keys and values are those of "auto".
        max_adapters: the most LoRA adapters with names.
        adapter_memory: bytes of loaded adapters, including those sent with requests. Adapters that no request uses are
            evicted, least recently used first and fairly between tenants; named ones are read from disk again.
        adapter_host_memory: bytes of copies that evicted adapters leave in host memory. None is 1 GiB with a GPU and
            none on CPUs.
        pinned_adapters: adapters of the model that are never evicted.
        max_logits_bytes: the most bytes of logits (of prompt and generated tokens together) that one request may ask
            for. The engine and the caller's process hold them in memory. 0 allows none.
        threads: threads of the engine. None is the number of physical cores that this process may use, by CPU affinity
            and within the CPU quota of its control groups.
        trust_remote_code: run Python code that comes with the model.
        idle_timeout: seconds for which an engine process outlives its last client.
        stall_timeout: seconds without a step, despite work to do, after which an engine is restarted.
        start_timeout: seconds that the start of an engine may take.
        encoder_cache: bytes of the features of images that an engine keeps in memory for later requests with the same
            images. 0 keeps none.
        packed_cache: bytes that packed weights may take in this user's cache directory. Later starts map them. 0 turns
            the cache off.
        standby: 1 keeps a second process loaded, which takes over when the engine dies.
        in_process: run the engine on a thread of this process, for debugging and small tests; about half the speed.
        engine: "native" is this package's own engine; "vllm" runs the model in vLLM, which is installed separately.
        engine_python: the Python interpreter of engines that are not native, where their package is installed. None is
            the interpreter that runs the server. A model cannot choose it, and neither can a caller of the API.
        engine_args: arguments of engines that are not native, by their own names; those of vLLM are the fields of its
            ``EngineArgs``, such as {"tensor_parallel_size": 2}. A model or a caller of the API cannot choose them.
        backend: settings of other engine backends, by their names. This engine has none besides those above.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {  # for one release
        "picture_cache": "encoder_cache",  # the old name
        "launch_ahead": "async_scheduling",  # the old name
    }
    DROPPED: ClassVar[Mapping[str, Any]] = {"compile": False}

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Device = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    kernels: Literal["auto", "torch"] = "auto"
    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count | None = None
    max_queued_requests: CountOrZero = 4096
    kv_cache_memory: Bytes | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    kv_block_size: BlockSize | None = None
    cuda_graphs: Literal["auto", "none"] = "auto"
    async_scheduling: Literal["auto", "none"] = "auto"
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
    encoder_cache: BytesOrZero = 256 << 20
    packed_cache: BytesOrZero = 32 << 30
    standby: Annotated[int, Meta(ge=0, le=1)] = 0
    in_process: bool = False
    engine: Literal["native", "vllm"] = "native"
    engine_python: Interpreter | None = None
    engine_args: EngineArgs = msgspec.field(default_factory=dict)
    backend: ByBackend = msgspec.field(default_factory=dict)

    def of_backend(self, name: str, kind: type[BackendSettings]) -> BackendSettings:
        """Return the settings that backend ``name`` has in addition to those of all engines.

        Raises ``InvalidField`` for values that ``kind`` does not allow, and for settings of any other backend.
        """
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
        if self.engine != "native" and self.in_process:
            raise InvalidField("in_process", True, f"false with engine {self.engine}, which has its own interpreter")


GRANTED = ("trust_remote_code", "engine_python", "engine_args")
"""The settings that run code which is not this package's: a server's own command line grants them, nobody else."""


def check_server_engine(values: Mapping[str, Any], parent: str = "") -> None:
    """Check engine settings for a server, which runs engines in processes of their own. Raises ``InvalidField``."""
    if EngineSettings.read(values, parent).in_process:
        field = f"{parent}.in_process" if parent else "in_process"
        raise InvalidField(field, True, "false: it is for notebooks; a server's engines have their own processes")


def check_name(name: Any, field: str = "name", hint: str = "") -> str:
    """Check the name of an endpoint or served entity, which is used in URLs. Raises ``InvalidField``."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidField(field, name, f"{NAME_ALLOWED}{hint}")
    return name
