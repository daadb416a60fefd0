"""llama.cpp's server over HTTP, built for this CPU: a slot for each of 32 callers, one cache for all of them."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from load import Server, free_port

from comparison.adapters.http_streams import HttpStreams
from comparison.drive import serve


def body(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": request["prompt"],
        "n_predict": request["max_tokens"],
        "temperature": 0,
        "top_k": 1,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
    }


def read(event: dict[str, Any]) -> tuple[list[int], str]:
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    return ([], "") if event["stop"] else (event["tokens"], event["content"])


def load(model: str, options: dict[str, Any]) -> HttpStreams:
    port, cores = free_port(), len(os.sched_getaffinity(0))
    command = [options["server"], "-m", options["model"], "--host", "127.0.0.1", "--port", str(port)]
    command += ["-c", "16384", "-np", "32", "--kv-unified", "-t", str(cores)]
    told = {}
    server = Server(command, port, probe="/health")
    try:
        server.__enter__()
    except RuntimeError:  # a build with AMX may crash as it packs weights
        told["weights"] = "not repacked: it crashed with them"
        server = Server([*command, "--no-repack"], port, probe="/health")
        server.__enter__()
    said = subprocess.run([options["server"], "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: (.*)", said.stdout + said.stderr)
    told["llama.cpp"] = found.group(1) if found else "unknown"
    return HttpStreams(port, "/completion", body, read, told, server.__exit__)


if __name__ == "__main__":
    serve(load)
