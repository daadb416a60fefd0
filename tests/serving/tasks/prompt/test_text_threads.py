"""One text model, many threads."""

import threading
from concurrent.futures import ThreadPoolExecutor


def test_threads_get_what_one_thread_gets(text):
    """Concurrent threads get the same results as one thread, for chats, raw prompts and decoding."""
    plain = [{"role": "user", "content": "hello world"}]
    marked = [{"role": "user", "content": "a<|end|>b <s>"}]
    jobs = [
        lambda: text.chat(plain),
        lambda: text.chat(marked),
        lambda: text.encode("the <|end|> dog"),
        lambda: text.decode(range(4, 300)),
        lambda: list(text.encode_embeddings(["the quick brown fox", "dog"], 4)),
    ]
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: jobs[i % len(jobs)](), range(400)))
    assert together == [alone[i % len(jobs)] for i in range(400)]


def test_long_texts_let_others_run(text):
    """While one thread tokenises megabytes, and while it only counts, another gets its turns; the ids are the same."""
    long = "some words, and more of them. " * 60_000
    marked = [{"role": "user", "content": "<|end|>" + long}]
    works = (
        lambda: text.encode(long),
        lambda: text.surely_over(long, 400_000),
        lambda: text.chat(marked),
        lambda: list(text.encode_embeddings([long[:2000]] * 900, 512)),
    )
    for work in works:
        turns, over = 0, threading.Event()

        def ticker(over: threading.Event = over) -> None:
            nonlocal turns
            while not over.wait(0.001):
                turns += 1

        thread = threading.Thread(target=ticker)
        thread.start()
        try:
            work()
        finally:
            over.set()
            thread.join(240)
        assert not thread.is_alive()
        assert turns > 20
    short = long[:20_000]
    assert text.encode(short) == tuple(text.backend.encode(short).ids)
