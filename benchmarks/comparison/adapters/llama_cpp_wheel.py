"""llama.cpp's server over HTTP as the wheels of xllamacpp have it: for any CPU with AVX2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from comparison.adapters.http_streams import HttpStreams
from comparison.adapters.llama_cpp import body, read
from comparison.drive import serve, versions


def host(model: str) -> None:
    """Run the server in a process that ends with its stdin, and print its port."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.n_ctx, parameters.n_parallel, parameters.kv_unified = 16384, 32, True
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(parameters)
    print("LISTENING", server.listening_address.rsplit(":", 1)[1].strip("/"), flush=True)
    sys.stdin.read()
    os._exit(0)


def load(model: str, options: dict[str, Any]) -> HttpStreams:
    command = [sys.executable, str(Path(__file__)), options["model"]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = next((line.split()[1] for line in process.stdout if line.startswith("LISTENING")), None)
    if port is None:
        raise RuntimeError("the server did not come up")
    return HttpStreams(int(port), "/completion", body, read, versions("xllamacpp"), process.kill)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        host(sys.argv[1])
    else:
        serve(load)
