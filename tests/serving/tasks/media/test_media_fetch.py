"""Images fetched from URLs: by allowed hosts alone, within a time and a size, whatever the server does."""

import io
import itertools
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from certificates import Authority
from PIL import Image

from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import MediaPart, Message
from mlflow_llm.serving.tasks.media import fetch, source
from mlflow_llm.serving.tasks.media.media import images_of

MAX_BYTES = 20 << 20
FIELD = "messages[0].content[0].image_url.url"
FOREVER = 600.0  # seconds; the test ends for another reason


def image():
    file = io.BytesIO()
    Image.new("RGB", (2, 1), (1, 2, 3)).save(file, format="PNG")
    return file.getvalue()


PNG = image()
OK = b"HTTP/1.1 200 OK\r\n"


def whole(data):
    return OK + b"Content-Length: %d\r\n\r\n" % len(data) + data


@contextmanager
def server(answer, context=None, listens=True):
    """Serve ``answer(connection)`` to each connection, after its request unless told not to listen.

    Yields its port and the requests that it got.
    """
    requests, stop = [], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def serve(accepted):
        with accepted, suppress(OSError):  # the client has closed
            accepted.settimeout(FOREVER)
            with context.wrap_socket(accepted, server_side=True) if context else accepted as connection:
                head = b"" if listens else b"\r\n\r\n"
                while b"\r\n\r\n" not in head and (data := connection.recv(65536)):
                    head += data
                requests.append(head)
                answer(connection)

    def accept():
        while not stop.is_set():
            try:
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()
            except TimeoutError:
                continue

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield listener.getsockname()[1], requests
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        listener.close()


def sent(*pieces):
    """Return an answer of these pieces, after which the server waits until the client closes."""

    def answer(connection):
        for piece in pieces:
            connection.sendall(piece)
        connection.recv(1)

    return answer


def closed(*pieces):
    """Return an answer of these pieces, after which the server closes."""

    def answer(connection):
        for piece in pieces:
            connection.sendall(piece)

    return answer


def asked(url, allowed=("127.0.0.1", "localhost"), deadline=None, place=None, max_bytes=MAX_BYTES):
    host = url.split("/")[2]
    part = MediaPart(
        kind="image",
        source="url",
        place=place or host,
        content=url,
        max_bytes=max_bytes,
        field=FIELD,
        part="messages[0].content[0]",
    )
    settings = DialectSettings(allowedMediaDomains=allowed)
    (found,) = images_of([Message(role="user", content=(part,))], settings, reads_images=True, deadline=deadline)
    return found


def refusal(url, **options):
    with pytest.raises(InvalidField) as caught:
        asked(url, **options)
    assert caught.value.param == FIELD
    return caught.value.message.removeprefix(FIELD + ": ")


@pytest.mark.parametrize(
    "answer",
    [
        closed(whole(PNG)),
        sent(whole(PNG)),
        sent(*(bytes((byte,)) for byte in whole(PNG))),
        closed(b"HTTP/1.0 200 OK\r\n\r\n" + PNG),
        sent(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n" % 5 + PNG[:5] + b"\r\n",
             b"%x;name=value\r\n" % (len(PNG) - 5) + PNG[5:] + b"\r\n0\r\n\r\n"),
        sent(b"HTTP/1.1 103 Early Hints\r\n\r\n"[:0] + b"HTTP/1.1 100 Continue\r\n\r\n" + whole(PNG)),
        sent(OK + b"Content-Encoding: identity\r\nContent-Length: %d\r\n\r\n" % len(PNG) + PNG),
        sent(whole(PNG) + b"more than its length"),
    ],
    ids=["closed", "kept open", "a byte at a time", "HTTP/1.0", "chunked", "after 100", "identity", "longer"],
)  # fmt: skip
def test_answers(answer):
    """An image arrives in whatever way a server sends it."""
    with server(answer) as (port, _):
        found = asked(f"http://127.0.0.1:{port}/a.png")
    assert (found.width, found.height, found.data) == (2, 1, bytes((1, 2, 3)) * 2)


def test_what_is_asked():
    """The request has no credentials and no cookies; invalid URL characters are escaped, and escapes stay."""
    with server(closed(whole(PNG))) as (port, requests):
        asked(f"http://localhost:{port}/a b/ü%20.png?x=1&y=ä b#part")
        asked(f"http://localhost:{port}")
        asked(f"http://localhost:{port}/a\r\nX-Evil: 1\r\n")
    assert requests[0].decode() == (
        "GET /a%20b/%C3%BC%20.png?x=1&y=%C3%A4%20b HTTP/1.1\r\n"
        f"Host: localhost:{port}\r\n"
        "Accept: image/png, image/jpeg, image/webp, image/gif\r\n"
        "Accept-Encoding: identity\r\nUser-Agent: mlflow-llm\r\nConnection: close\r\n\r\n"
    )
    assert requests[1].startswith(b"GET / HTTP/1.1\r\n")
    assert requests[2].startswith(b"GET /aX-Evil:%201 HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (closed(b"HTTP/1.1 404 Secret\r\n\r\nsecret"), "the server answered 404"),
        (closed(b"HTTP/1.1 500 Secret\r\n\r\n"), "the server answered 500"),
        (closed(b"HTTP/1.1 204 No\r\n\r\n"), "the server answered 204"),
        (
            closed(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/secret\r\n\r\n"),
            "the server answered 302, a redirect, which is not followed",
        ),
        (closed(), "the server closed the connection too early"),
        (closed(OK), "the server sent nothing"),
        (closed(OK + b"Content-Length: 0\r\n\r\n"), "the server sent nothing"),
        (closed(OK + b"Content-Length: 900\r\n\r\n" + PNG), "the server closed the connection too early"),
        (closed(OK + b"Transfer-Encoding: chunked\r\n\r\n90\r\nabc"), "the server closed the connection too early"),
        (closed(OK + b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n"), "the server closed the connection too early"),
        (closed(b"SSH-2.0-secret\r\n"), "the server's answer is not valid HTTP"),
        (closed(b"HTTP/9 secret\r\n\r\n"), "the server's answer is not valid HTTP"),
        (closed(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000), "the server's answer is not valid HTTP"),
        (closed(OK + b"X: y\r\n" * 200 + b"\r\n"), "the server's answer is not valid HTTP"),
        (closed(OK + b"Content-Encoding: gzip\r\n\r\nabc"), "the server sent it compressed"),
    ],
)
def test_answers_that_are_no_image(answer, why):
    """The error describes the server's failure in our words and repeats nothing of its answer."""
    with server(answer) as (port, requests):
        found = refusal(f"http://127.0.0.1:{port}/a")
    assert found == f"'127.0.0.1:{port}' is not allowed; expected a URL that can be fetched: {why}"
    assert len(requests) == 1


def test_an_answer_that_is_not_decoded():
    """A fetched file that is not an image is described by its type alone; a short Content-Length truncates one."""
    with server(closed(whole(b"<html>secret"))) as (port, _):
        found = refusal(f"http://127.0.0.1:{port}/a")
    assert found.startswith("'an HTML file' is not allowed; expected an image in PNG")
    assert "secret" not in found
    with server(closed(OK + b"Content-Length: 40\r\n\r\n" + PNG)) as (port, _):
        assert refusal(f"http://127.0.0.1:{port}/a").startswith("'a PNG file' is not allowed")


def endless(head, piece):
    def answer(connection):
        connection.sendall(head)
        for each in itertools.repeat(piece):
            connection.sendall(each)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        closed(OK + b"Content-Length: %d\r\n\r\n" % (MAX_BYTES + 1)),
        closed(OK + b"\r\n", bytes(MAX_BYTES + 1)),
        endless(OK + b"\r\n", bytes(1 << 16)),
        endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", (b"10000\r\n" + bytes(1 << 16) + b"\r\n")),
    ],
    ids=["its length", "a byte too much", "endless", "endless chunks"],
)
def test_too_large(answer, monkeypatch):
    """A body of a byte too much and an endless one are given up as soon as they are too large."""
    monkeypatch.setattr(source, "FETCH_SECONDS", FOREVER)
    with server(answer) as (port, _):
        found = refusal(f"http://127.0.0.1:{port}/a")
    assert found == f"'more than {MAX_BYTES} bytes' is not allowed; expected 1 to {MAX_BYTES} bytes"


@pytest.mark.parametrize(
    "answer",
    [
        endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 1000),
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    ],
    ids=["small chunks", "endless heads"],
)
def test_too_much_around_the_body(answer, monkeypatch):
    """Endless heads and chunks of a byte, which are work without an image, are given up after half a megabyte."""
    monkeypatch.setattr(source, "FETCH_SECONDS", FOREVER)
    with server(answer) as (port, _):
        found = refusal(f"http://127.0.0.1:{port}/a")
    assert found.endswith("the server's answer is not valid HTTP")


def trickle(head, piece):
    """Return a server that sends a little again and again, so that no single wait is long."""

    def answer(connection):
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(0.01)

    return answer


@pytest.mark.parametrize(
    "answer",
    [sent(), sent(OK), sent(OK + b"Content-Length: 100\r\n\r\nabc"), trickle(OK + b"X: ", b"y"),
     trickle(OK + b"\r\n", b"y")],
    ids=["nothing", "half a head", "half a body", "trickled head", "trickled body"],
)  # fmt: skip
@pytest.mark.parametrize("what", ["url", "request", "all"])
def test_too_slow(answer, what, monkeypatch):
    """A server that stalls or trickles is given up at the end of the time of the URL, the request or all URLs."""
    name = {"url": "FETCH_SECONDS", "all": "ALL_FETCHES_SECONDS"}.get(what)
    for limit in ("FETCH_SECONDS", "ALL_FETCHES_SECONDS"):
        monkeypatch.setattr(source, limit, 0.1 if limit == name else FOREVER)
    deadline = time.monotonic() + 0.1 if what == "request" else None
    with server(answer) as (port, _):
        found = refusal(f"http://127.0.0.1:{port}/a", deadline=deadline)
    assert found.endswith("a URL that can be fetched: it took too long")


def test_the_time_of_all_urls():
    """All URLs of a request share a time; when it is over, the next is not even looked up."""
    part = MediaPart(kind="image", source="url", place="h", content="http://h/", max_bytes=9, field=FIELD, part="p")
    sources = source.Sources(DialectSettings(allowedMediaDomains=("h",)), None)
    sources.left = 0.0
    with pytest.raises(InvalidField, match="it took too long"):
        sources.read(part)


def test_hosts_that_are_not_there(monkeypatch):
    """A host without an address, or without a server at any of its addresses, is an error; each address is tried."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert refusal(f"http://127.0.0.1:{port}/a").endswith("fetched: the connection with the server failed")

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(fetch, "current_resolve", unknown)
    assert refusal("http://localhost/a").endswith("fetched: its host is not known")
    with server(closed(whole(PNG))) as (open_port, _):
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", number)) for number in (port, open_port)]
        monkeypatch.setattr(fetch, "current_resolve", lambda *_: both)
        assert asked("http://localhost/a").width == 2


def test_hosts_that_are_not_allowed():
    """The URL's own host is checked, whatever the dialect read, and other schemes are refused."""
    for url in ("http://evil.example/a", "http://127.0.0.1@evil.example/a", "http://[::1/a", "ftp://127.0.0.1/a",
                "file:///etc/passwd", "http://127.0.0.1:99999/", "http:///a", ""):  # fmt: skip
        part = MediaPart(
            kind="image",
            source="url",
            place="127.0.0.1",
            content=url,
            max_bytes=9,
            field=FIELD,
            part="messages[0].content[0]",
        )
        settings = DialectSettings(allowedMediaDomains=("127.0.0.1",))
        with pytest.raises(InvalidField) as caught:
            source.Sources(settings, None).read(part)
        assert caught.value.param == FIELD
    assert refusal("http://h.example/a", allowed=None).endswith("allowedMediaDomains: none are allowed")


def test_no_proxy(monkeypatch):
    """Proxies of the environment are not used, since they would learn callers' URLs."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with server(closed(whole(PNG))) as (port, _):
        assert asked(f"http://127.0.0.1:{port}/a").width == 2


def test_tls(tmp_path, monkeypatch):
    """Over TLS, the certificate must be of the host and signed by an authority that the machine trusts."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key, _ = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    trusting = {name: ssl.create_default_context(cafile=one.ca) for name, one in {"ca": authority, "o": other}.items()}
    address = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    with server(closed(whole(PNG)), context) as (port, requests):
        monkeypatch.setattr(fetch, "tls_context", lambda: trusting["ca"])
        assert asked(f"https://localhost:{port}/a").width == 2
        monkeypatch.setattr(fetch, "current_resolve", lambda *_: [(*address[0][:4], ("127.0.0.1", port))])
        invalid = "the server's certificate is not valid for it"
        assert refusal(f"https://h.example:{port}/a", allowed=("h.example",)).endswith(invalid)
        monkeypatch.setattr(fetch, "tls_context", lambda: trusting["o"])
        assert refusal(f"https://localhost:{port}/a").endswith(invalid)
    assert len(requests) == 1
    monkeypatch.undo()
    with server(sent(b"HTTP/1.1 400 Plain\r\n\r\n"), listens=False) as (port, _):
        assert refusal(f"https://127.0.0.1:{port}/a").endswith("the TLS connection with the server failed")
    monkeypatch.setattr(fetch, "tls_context", lambda: trusting["ca"])
    with server(closed(OK + b"\r\n" + PNG), context) as (port, _):  # closed without TLS's own end: perhaps cut
        assert refusal(f"https://localhost:{port}/a").endswith("the server closed the connection too early")
    with server(endless(OK + b"\r\n", bytes(1 << 14)), context) as (port, _):
        assert "more than" in refusal(f"https://localhost:{port}/a", max_bytes=1000)


def test_descriptors_are_closed(monkeypatch):
    """The connection is closed after success and after every error."""
    answers = [closed(whole(PNG)), closed(b"HTTP/1.1 404 No\r\n\r\n"), closed(b"nonsense\r\n"), closed()]
    made = []
    real = fetch.connect_to
    monkeypatch.setattr(fetch, "connect_to", lambda *given: made.append(real(*given)) or made[-1])
    for answer in answers:
        with server(answer) as (port, _), suppress(InvalidField):
            asked(f"http://127.0.0.1:{port}/a")
    assert [one.fileno() for one in made] == [-1] * 4


GEVENT = """
import sys
import gevent.monkey
if sys.argv[1] == "patched": gevent.monkey.patch_all()
import _thread, gevent, gevent.threadpool, _socket, time
from mlflow_llm.serving.interface.dialect_settings import DialectSettings
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.frontend import gevent_wait
from mlflow_llm.serving.interface.request import MediaPart, Message
from mlflow_llm.serving.tasks.media.media import images_of
gevent_wait.install()
port = int(sys.argv[2])
def ask(path):
    part = MediaPart(kind="image", source="url", place="localhost", content=f"http://localhost:{port}/{path}",
                     max_bytes=1000000, field="f", part="p")
    settings = DialectSettings(allowedMediaDomains=("localhost",))
    try:
        found = images_of([Message(role="user", content=(part,))], settings, reads_images=True,
                            deadline=time.monotonic() + 0.4 if path == "never" else None)
    except InvalidField as error:
        return str(error).rpartition(": ")[2]
    return found[0].width
turns = []
def ticks():
    while True:
        turns.append(1)
        gevent.sleep(0.005)
gevent.spawn(ticks)
print(gevent.spawn(ask, "never").get(), len(turns) > 1)
pool = gevent.threadpool.ThreadPool(2)
jobs = [gevent.spawn(ask, "a") for _ in range(8)] + [gevent.spawn(pool.apply, ask, ("a",)) for _ in range(4)]
gevent.joinall(jobs, raise_error=True)
print([job.value for job in jobs] == [2] * 12)
killed = gevent.spawn(ask, "never")
gevent.sleep(0.05)
killed.kill()
print(killed.successful(), ask("never") if sys.argv[1] == "patched" else "")
gevent.get_hub().resolver.getaddrinfo = lambda *_, **__: gevent.sleep(600)
print(gevent.spawn(ask, "never").get())
"""


@pytest.mark.parametrize("way", ["patched", "plain"])
def test_the_loop_goes_on_meanwhile(way):
    """In a worker (monkey-patched) and in the gRPC process (not), greenlets wait for a server without holding up the
    others; threads beside them wait by themselves; one that is killed stops."""

    def answer(connection):
        if b"/never" in requests[-1]:
            connection.recv(1)
        else:
            connection.sendall(whole(PNG))

    with server(answer) as (port, requests):
        found = subprocess.run(
            [sys.executable, "-c", GEVENT, way, str(port)], stdout=subprocess.PIPE, text=True, check=True
        )
    last = "it took too long" if way == "patched" else ""
    assert found.stdout == f"it took too long True\nTrue\nTrue {last}\nit took too long\n"
