"""A process that meters requests until it is killed: ``ledger_worker.py URL STATE_DIR TRUTH_FILE NAME REQUESTS``.

Before each step it appends what the step will do to TRUTH_FILE, so that after a kill all but the last line is certain.
"""

from __future__ import annotations

import os
import random
import sys

from mlflow_llm.serving.interface.errors import LimitExceeded, Unavailable
from mlflow_llm.serving.metering import Ledger, Reservation, Store


def main(url: str, state_dir: str, truth: str, name: str, requests: int) -> None:
    ledger = Ledger(Store(url), state_dir=state_dir)
    ledger.start(interval=0.2)
    out = os.open(truth, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    draw = random.Random(name)

    def write(*words: object) -> None:
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    for number in range(requests):
        request_id = f"{name}-{number}"
        reservation = Reservation(
            request_id=request_id,
            key_id=f"key_{draw.randrange(3)}",
            tenant="acme",
            endpoint=f"chat{draw.randrange(2)}",
            entity="m",
            mode="pay_per_token",
            task="chat",
            input_tokens=10,
            max_output_tokens=40,
        )
        write("reserve", request_id, 0)
        try:
            lease = ledger.reserve(reservation)
        except (LimitExceeded, Unavailable):
            write("refused", request_id, 0)
            continue
        with lease:
            for _ in range(draw.randrange(8)):
                tokens = draw.randrange(1, 5)
                write("count", request_id, tokens)
                lease.count(tokens)
            write("settle", request_id, 0)
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
