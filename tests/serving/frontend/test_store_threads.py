"""The store's threads in a monkey-patched process, where Python's locks are gevent's."""

from __future__ import annotations

import subprocess
import sys

START = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
from mlflow_llm.serving.interface.errors import Unavailable
from mlflow_llm.serving.metering import Store; from mlflow_llm.serving.metering.store import store as module
from mlflow_llm.serving.frontend.background.store_threads import StoreThreads

store = Store(sys.argv[1], run=StoreThreads.for_url(sys.argv[1]))
"""

LOOPS = """
sys.setswitchinterval(1e-5)  # the threads meet wherever they can

for transact in (store.write, store.read):
    # what gevent does in a thread that finds a lock taken and does not wait for it: the thread gets an event loop
    gevent.joinall([gevent.spawn(transact, lambda connection: gevent.sleep(0.01)) for _ in range(8)])

def many(transact):
    for _ in range(500):
        transact(lambda connection: connection.exec_driver_sql("SELECT 1").scalar_one())

ones = [gevent.spawn(many, transact) for transact in (store.write, store.read) * 8]
gevent.joinall(ones, timeout=240)
print(sum(one.successful() for one in ones))
"""

STUCK = """
module.STUCK_SECONDS = 0.2
native = monkey.get_original("_thread", "allocate_lock")
held = [native() for _ in range(8)]
for lock in held:
    lock.acquire()
stuck = [gevent.spawn(store.write, lambda connection, lock=lock: lock.acquire()) for lock in held]
gevent.sleep(0.1)
try:
    store.write(lambda connection: print("begun"), timeout=0.1)
except Unavailable as error:
    print(error.message)
print(store.read(lambda connection: connection.exec_driver_sql("SELECT 1").scalar_one(), timeout=60))
for lock in held:
    lock.release()
gevent.joinall(stuck, timeout=240)
print(store.write(lambda connection: "again", timeout=60))
"""


def run(script: str, url: str) -> str:
    done = subprocess.run([sys.executable, "-c", START + script, url], capture_output=True, text=True, timeout=240)
    assert not done.stderr, done.stderr
    return done.stdout


def test_threads_that_have_event_loops_never_wait_for_each_other(store_url):
    """Threads with event loops of their own do not deadlock at the lock of the store's connections."""
    assert run(LOOPS, store_url) == "16\n"


def test_a_transaction_that_never_ends_times_out(store_url):
    """While a transaction hangs others time out with an error and are not begun later; reads go on."""
    assert run(STUCK, store_url) == "the metering store does not answer\n1\nagain\n"
