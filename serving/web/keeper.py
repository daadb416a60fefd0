"""The process that starts a server's engines and keeps them: started again when they die, ended with the server.

``python -m mlflow_llm.serving.web.keeper SPEC`` writes one JSON line of progress for each step to standard output, the
last one ``{"stage": "ready"}`` after every engine has generated a token, and then waits for the end of its standard
input, which the server holds open for as long as it lives, however it ends.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

from ..errors import PackagingError, ServingError
from ..transport.client import connect
from .spec import ServeSpec, connect_options
from .warm import generate_one


def say(stage: str, **fields: object) -> None:
    print(json.dumps({"stage": stage, **fields}), flush=True)


def _tell(endpoint: str, stage: str) -> None:
    if stage != "ready":  # ours is said after a token
        say(stage, endpoint=endpoint)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server decides when we end
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=ServeSpec)
    engines = []
    try:
        for endpoint in spec.endpoints:
            started = time.monotonic()
            options = connect_options(spec, endpoint)
            engine = connect(
                endpoint.bundle,
                endpoint.engine,
                progress=partial(_tell, endpoint.name),
                keep=True,
                **options,
            )
            engines.append(engine)
            say("loaded", endpoint=endpoint.name, seconds=round(time.monotonic() - started, 2))
            say("token", endpoint=endpoint.name, seconds=round(generate_one(engine), 3))
    except (ServingError, PackagingError) as error:
        say("failed", message=str(error))
        return 1
    say("ready")
    try:
        sys.stdin.buffer.read()
    finally:
        for engine in engines:
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
