"""The Ray process of the leader: ``python -m mlflow_llm.serving.control.ray_runtime.process``.

Ray's client has threads, signal handlers and checks that end its process, which are kept out of the controller process
by this one. It reads a ``Launch`` and then orders from standard input, a line each, and answers each order with a
report. When standard input closes, it ends; the actors go on.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import BinaryIO, Protocol

import msgspec

from ...system import logs
from .cluster import ClusterError, RayCluster
from .messages import Launch, Order, Report

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0


class Cluster(Protocol):
    """The part of a cluster that this process needs; see ``RayCluster``."""

    def obey(self, order: Order) -> dict[str, str]: ...
    def report(self) -> Report: ...


def obey_all(
    orders: BinaryIO, answers: BinaryIO, connect: Callable[[Launch], Cluster], *, clock: Callable[[], float]
) -> None:
    """Answer each order until there are no more. A cluster that cannot be reached is tried again, some seconds apart,
    while orders come."""
    launch = msgspec.json.decode(orders.readline(), type=Launch)
    cluster: Cluster | None = None
    error, tried_at = "", -AGAIN_SECONDS
    while line := orders.readline():
        order = msgspec.json.decode(line, type=Order)
        if cluster is None and clock() - tried_at >= AGAIN_SECONDS:
            tried_at = clock()
            try:
                cluster, error = connect(launch), ""
            except ClusterError as failure:
                error = str(failure)
        if cluster is None:
            report = Report(error=error)
        else:
            failed = cluster.obey(order)
            found = cluster.report()
            report = msgspec.structs.replace(found, failed=found.failed | failed)
        answers.write(msgspec.json.encode(report) + b"\n")
        answers.flush()


def main() -> int:
    """Run until standard input closes, and return the exit status."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray and its children print is no answer
    logs.take_over("warning")
    with answers:
        obey_all(sys.stdin.buffer, answers, RayCluster, clock=time.monotonic)
    return 0


if __name__ == "__main__":
    sys.exit(main())
