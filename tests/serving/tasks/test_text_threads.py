"""One text model, many threads."""

from concurrent.futures import ThreadPoolExecutor


def test_threads_get_what_one_thread_gets(text):
    """Chats with and without control tokens, raw prompts and decoding at once give what each gives alone."""
    plain = [{"role": "user", "content": "hello world"}]
    marked = [{"role": "user", "content": "a<|end|>b <s>"}]
    jobs = [
        lambda: text.chat(plain),
        lambda: text.chat(marked),
        lambda: text.encode("the <|end|> dog"),
        lambda: text.decode(range(4, 300)),
        lambda: text.encode_embedding("the quick brown fox", 4),
    ]
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: jobs[i % len(jobs)](), range(400)))
    assert together == [alone[i % len(jobs)] for i in range(400)]
