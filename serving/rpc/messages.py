"""The messages of ``kserve.proto``, from protoc's description of them in ``kserve.binpb``.

They are in a separate descriptor pool, so that this process may import a client with messages of the same names. They
are not generated code, which would have to be generated again for each major version of protobuf's runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTION = Path(__file__).with_name("kserve.binpb")
SERVICE = "inference.GRPCInferenceService"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTION.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _pool()


def message(name: str) -> Any:
    """Return the class of a message, by its name in ``kserve.proto``."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
