"""The messages of our .proto: what protoc makes of it now, and what Triton's own client has for them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from mlflow_llm.serving.interface.errors import walk
from mlflow_llm.serving.rpc.messages import DESCRIPTION, POOL, SERVICE
from mlflow_llm.serving.rpc.statuses import STATUSES


def test_the_description_is_that_of_the_proto(tmp_path: Path) -> None:
    """kserve.binpb is the output of protoc for kserve.proto."""
    pytest.importorskip("grpc_tools")
    made = tmp_path / "made.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{DESCRIPTION.parent}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, "kserve.proto"], check=True)
    assert made.read_bytes() == DESCRIPTION.read_bytes()


def fields(message: Any) -> dict[str, tuple[int, int, bool]]:
    return {field.name: (field.number, field.type, field.is_repeated) for field in message.fields}


def test_every_message_is_that_of_triton_s_client() -> None:
    """Field numbers, types and service calls equal those of Triton's client."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        service = pytest.importorskip("tritonclient.grpc.service_pb2")
        config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    theirs = {**service.DESCRIPTOR.message_types_by_name, **config.DESCRIPTOR.message_types_by_name}
    ours = POOL.FindFileByName("kserve.proto").message_types_by_name
    pairs = [(message, theirs[name]) for name, message in ours.items()]
    while pairs:
        own, other = pairs.pop()
        assert fields(own).items() <= fields(other).items(), own.full_name
        pairs += [(nested, other.nested_types_by_name[name]) for name, nested in own.nested_types_by_name.items()]
    methods = service.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, method in POOL.FindServiceByName(SERVICE).methods_by_name.items():
        assert method.input_type.full_name == methods[name].input_type.full_name
        assert method.output_type.full_name == methods[name].output_type.full_name


def test_every_error_has_a_status() -> None:
    """Each class of the error tree has its gRPC status."""
    assert {error.kind for error in walk()} == set(STATUSES)
