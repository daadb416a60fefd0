"""Admissions a second of one tenant with limits, over one or several gateways and a database near or far.

Each gateway is a process that reserves, counts and settles as a worker does: requests are greenlets, transactions run
on threads. The tenant, its key and the endpoint have limits of all kinds. ``--delay`` puts a proxy before PostgreSQL
that adds so many milliseconds to each round trip. At the end the windows are compared with the ledger's
rows, and the rows with what was admitted. Also written to results/.

python benchmarks/admissions.py [--gateways 1 2 4] [--delay 0 5 20] [--seconds 5] [--clients 64] [--url postgresql://…]
"""

from __future__ import annotations

import sys

from gevent import monkey

if "--proxy" not in sys.argv:  # before any import that creates a lock; the proxy has threads of its own
    monkey.patch_all()

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SCOPES = (("key", "key_1"), ("tenant", "acme"), ("endpoint", "chat"))
KINDS = ("itpm", "otpm", "qpm", "in_flight", "budget")


def gateway(url: str, state: str, seconds: float, clients: int) -> None:
    """Admit and settle requests from ``clients`` greenlets, and print how many and how long they took."""
    import gevent

    from mlflow_llm.serving.frontend.background.store_threads import StoreThreads
    from mlflow_llm.serving.interface.errors import Unavailable
    from mlflow_llm.serving.metering.ledger.lease import Reservation
    from mlflow_llm.serving.metering.ledger.ledger import Ledger
    from mlflow_llm.serving.metering.store.store import Store

    ledger = Ledger(Store(url, run=StoreThreads.for_url(url)), state_dir=state)
    ledger.start()
    waits: list[float] = []
    refused: list[int] = []
    tag = f"{os.getpid()}"

    def client(number: int, until: float) -> None:
        count = 0
        while time.monotonic() < until:
            reservation = Reservation(
                request_id=f"{tag}-{number}-{count}",
                key_id="key_1",
                tenant="acme",
                endpoint="chat",
                entity="model-1",
                mode="pay_per_token",
                task="chat",
                input_tokens=100,
                max_output_tokens=256,
            )
            began = time.perf_counter()
            count += 1
            try:
                lease = ledger.reserve(reservation)
            except Unavailable:
                refused.append(1)
                gevent.sleep(0.1)
                continue
            with lease:
                waits.append(time.perf_counter() - began)
                lease.count(7)

    ledger.prices.at(("model-1", "chat"), time.time())
    print("ready", flush=True)
    sys.stdin.readline()  # all gateways begin together
    began, cpu = time.monotonic(), time.process_time()
    gevent.joinall([gevent.spawn(client, number, began + seconds) for number in range(clients)], raise_error=True)
    took, cpu = time.monotonic() - began, time.process_time() - cpu
    ledger.close()
    waits.sort()
    figures = {"admitted": len(waits), "refused": len(refused), "seconds": took, "cpu": cpu}
    print(json.dumps(figures | {"median": waits[len(waits) // 2] if waits else 0.0}), flush=True)


def proxy(target: int, delay: float) -> None:
    """Forward connections to ``target`` and back, each way half of ``delay`` seconds later."""
    import asyncio

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def send() -> None:
            while True:
                at, data = await due.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                if not data:
                    writer.close()
                    return
                writer.write(data)

        sender = asyncio.ensure_future(send())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                due.put_nowait((loop.time() + delay / 2, data))
        due.put_nowait((loop.time() + delay / 2, b""))
        await sender

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", target)
        for one in (writer, up_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(run())


@contextlib.contextmanager
def far(url: str, delay: float) -> Iterator[str]:
    """Yield the URL of the same database behind a proxy, if there is a ``delay``."""
    if not delay:
        yield url
        return
    head, _, rest = url.rpartition("@")
    port, _, name = rest.partition(":")[2].partition("/")
    command = [sys.executable, __file__, "--proxy", port, str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"{head}@127.0.0.1:{process.stdout.readline().strip()}/{name}"
        finally:
            process.kill()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a PostgreSQL server with its own defaults (``fsync`` is on), and yield the URL of a database."""
    found = shutil.which("initdb") or max(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), default="")
    if not found:
        raise SystemExit("PostgreSQL's server is not installed; give --url")
    as_user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    base = Path(tempfile.mkdtemp(prefix="admissions-"))
    if as_user:
        shutil.chown(base, "postgres", "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    control, data = str(Path(found).with_name("pg_ctl")), str(base / "data")

    def call(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, **as_user)  # type: ignore[call-overload]

    call(found, "-D", data, "-U", "bench", "-A", "trust", "-E", "UTF8")
    call(
        control, "-D", data, "-l", str(base / "log"), "-w", "-o", f"-p {port} -k {base} -c max_connections=300", "start"
    )
    try:
        yield f"postgresql://bench@127.0.0.1:{port}/postgres"
    finally:
        call(control, "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(base, ignore_errors=True)


def set_up(url: str) -> None:
    """Open the database, and set limits of all kinds that are never reached."""
    from mlflow_llm.serving.metering.accounts.limits import Limits
    from mlflow_llm.serving.metering.accounts.money import Price
    from mlflow_llm.serving.metering.accounts.prices import Prices
    from mlflow_llm.serving.metering.store.store import Store

    store = Store(url)
    for scope, subject in SCOPES:
        for kind in KINDS:
            Limits(store).set(scope, subject, kind, 2**50)
    Prices(store).set("model-1", Price(input=3_000_000, cached=300_000, output=15_000_000))
    store.close()


def checked(url: str) -> int:
    """Return how many rows are settled. Raises ``AssertionError`` if a window differs from them."""
    import sqlalchemy as sa

    from mlflow_llm.serving.metering.accounts.limits import check_integrity
    from mlflow_llm.serving.metering.store.store import Store
    from mlflow_llm.serving.metering.store.tables import ledger

    store = Store(url)
    check_integrity(store)
    settled = sa.select(sa.func.count()).where(ledger.c.status == "ok", ledger.c.completion_tokens == 7)
    count = store.read(lambda connection: connection.execute(settled).scalar_one())
    store.close()
    return int(count)


def measured(url: str, gateways: int, delay: float, seconds: float, clients: int) -> dict[str, float]:
    """Run ``gateways`` processes at once and return what they admitted together."""
    before = checked(url)
    with tempfile.TemporaryDirectory() as state, far(url, delay) as reached:
        processes = []
        for number in range(gateways):
            own = (reached, f"{state}/{number}", str(seconds), str(clients // gateways))
            command = [sys.executable, __file__, "--gateway", *own]
            Path(own[1]).mkdir()
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.communicate()[0]) for process in processes]
    admitted = sum(one["admitted"] for one in found)
    assert checked(url) - before == admitted, "a row is missing or doubled"
    assert admitted, "nothing was admitted"
    return {
        "per_second": round(sum(one["admitted"] / one["seconds"] for one in found), 1),
        "refused": sum(one["refused"] for one in found),
        "median_ms": round(max(one["median"] for one in found) * 1000, 1),
        "cpu_us": round(sum(one["cpu"] for one in found) / admitted * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--delay", type=float, nargs="+", default=[0.0, 5.0, 20.0], help="milliseconds")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=256, help="requests at once, over all gateways")
    parser.add_argument("--url", default=None)
    options = parser.parse_args()
    figures: dict[str, object] = {"cpu": _cpu(), "cores": os.cpu_count(), "clients": options.clients}
    with contextlib.nullcontext(options.url) if options.url else postgres() as url:
        set_up(url)
        for delay in options.delay:
            for gateways in options.gateways:
                name = f"{gateways} gateways, {delay:g} ms"
                figures[name] = measured(url, gateways, delay / 1000, options.seconds, options.clients)
                print(name, figures[name], flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "admissions.json").write_text(json.dumps(figures, indent=2) + "\n")


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gateway"]:
        gateway(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
    elif sys.argv[1:2] == ["--proxy"]:
        proxy(int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
