"""Release of engines with the last object that uses them, closed or garbage-collected; copies of a loaded model load
again."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import msgspec
import psutil
import pytest
from flavor_models import TEMPLATE, byte_tokenizer
from mlflow.exceptions import MlflowException
from processes import gone

from mlflow_llm.flavors import llm
from mlflow_llm.flavors.llm.errors import mlflow_error
from mlflow_llm.flavors.llm.predict import session
from mlflow_llm.flavors.llm.predict.language_model import LanguageModel
from mlflow_llm.flavors.llm.predict.pyfunc import PyfuncModel
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField, NotFound, Overloaded
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.testing.instant_core import InstantModel, write_model
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import connect

CORE = "mlflow_llm.serving.testing.instant_core:InstantCore"
ASKED: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
LOADS = 100
VERSIONS = 5
GROWTH = 48 << 20  # bytes; a hundred of these models that stayed would be hundreds of megabytes


def eventually(condition: Callable[[], bool], seconds: float = 240) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a directory of its own for engine processes of a model without weights."""
    base = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(session, "start_engine", lambda b, s: connect(b, s, state_dir=str(base / "r"), core=CORE))
    yield base / "r"
    shutil.rmtree(base, ignore_errors=True)


def bundle_of(directory: Path, number: int = 0) -> Bundle:
    bundle = write_model(directory / "model", InstantModel(vocab_size=272 + number))
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(directory / "tokenizer")
    return msgspec.structs.replace(bundle, tokenizer_dir=str(directory / "tokenizer"))


def pids(runtime: Path) -> set[int]:
    found = [line for process in psutil.process_iter(["pid", "cmdline"]) for line in [process.info]]
    return {one["pid"] for one in found if any(str(runtime) in word for word in one["cmdline"] or ())}


def held() -> tuple[int, int]:
    """Return the open files and the threads of clients."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("mlflow-llm")]
    return len(os.listdir("/proc/self/fd")), len(threads)


def test_a_loop_over_versions_stays_flat(runtime: Path, tmp_path: Path) -> None:
    """A hundred models of five versions, loaded, queried and released without a garbage collection, leave no thread,
    descriptor or process, and memory does not grow."""
    settings = EngineSettings(idle_timeout=0.2)
    bundles = [bundle_of(tmp_path / str(number), number) for number in range(VERSIONS)]
    with PyfuncModel(bundles[0], settings) as first:  # starts the sandbox, which the process keeps
        first.predict({"prompt": "x", "max_tokens": 2})
    del first
    gc.collect()  # leftovers of earlier tests are not counted
    before, sizes, models, seen = held(), [], [], set()
    gc.disable()
    try:
        for turn in range(LOADS):
            model = PyfuncModel(bundles[turn * VERSIONS // LOADS], settings)
            model.predict({"prompt": "x", "max_tokens": 2})
            models.append(weakref.ref(model))
            seen |= pids(runtime)
            del model
            if turn in (LOADS // 5, LOADS - 1):
                sizes.append(psutil.Process().memory_info().rss)
        assert not [model for model in models if model() is not None]
        assert eventually(lambda: held() == before), (held(), before)
    finally:
        gc.enable()
    assert seen
    assert eventually(lambda: all(map(gone, seen)) and not runtime.exists()), list(runtime.rglob("*"))
    assert sizes[1] - sizes[0] < GROWTH


def test_an_engine_in_this_process_ends_too(tiny_bundle: Bundle) -> None:
    """The thread of an ``in_process`` engine ends with the last object that uses it."""
    before = set(threading.enumerate())
    engine = session.start_engine(tiny_bundle, EngineSettings(in_process=True, kv_cache_memory=1 << 24))
    threads = set(threading.enumerate()) - before
    assert threads
    gone = weakref.ref(engine)
    del engine
    assert gone() is None
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()


def test_a_stream_keeps_its_engine(runtime: Path, tmp_path: Path) -> None:
    """A stream keeps its engine alive to the end of the text, although the model is released."""
    bundle = bundle_of(tmp_path)
    chunks = PyfuncModel(bundle, EngineSettings()).predict_stream(ASKED | {"max_tokens": 20})
    assert list(chunks)[-1]["usage"]["completion_tokens"] == 20
    stream = LanguageModel(bundle, EngineSettings()).complete(**(ASKED | {"max_tokens": 20}), stream=True)
    assert list(stream)
    assert stream.usage.completion_tokens == 20


@pytest.fixture
def loaded(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mlflow.pyfunc.PyFuncModel:
    """Return the result of ``mlflow.pyfunc.load_model``, over an engine without weights in this process."""
    monkeypatch.setattr(
        session, "start_engine", lambda bundle, settings: InstantEngine(bundle_of(tmp_path / "i"), settings)
    )
    llm.save_model(tmp_path / "saved", model=llama_dir)
    return mlflow.pyfunc.load_model(str(tmp_path / "saved"))


def test_closed_by_name(loaded: mlflow.pyfunc.PyFuncModel, tmp_path: Path) -> None:
    """``llm.close`` takes MLflow's object, ours and the object API's; closing twice is harmless, and later requests
    fail."""
    loaded.predict(ASKED)
    raw = loaded.get_raw_model()
    assert isinstance(raw, LanguageModel)
    assert raw.complete(**ASKED).usage.completion_tokens == 2
    llm.close(loaded)
    llm.close(loaded)
    with pytest.raises(MlflowException, match="this model was closed"):
        loaded.predict(ASKED)
    with llm.closing(mlflow.pyfunc.load_model(str(tmp_path / "saved"))) as model:
        model.predict(ASKED)
    with pytest.raises(MlflowException, match="this model was closed"):
        model.predict(ASKED)
    with llm.load_model(tmp_path / "saved") as person:
        llm.close(person)
        with pytest.raises(Exception, match="this model was closed"):
            person.complete("x")


def test_closing_other_objects_is_refused() -> None:
    """Closing a model of another flavor, or no model, is refused by name."""
    with pytest.raises(MlflowException, match="model: a dict is not allowed"):
        llm.close({})  # type: ignore[arg-type]


def test_copies_load_again(loaded: mlflow.pyfunc.PyFuncModel, tmp_path: Path) -> None:
    """A pickled or deep-copied model answers, and is not closed with its original."""
    loaded.predict(ASKED)
    copies = [pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)]
    people = [copy.deepcopy(loaded.get_raw_model()), pickle.loads(pickle.dumps(loaded.get_raw_model()))]
    llm.close(loaded)
    assert [again.predict(ASKED)["usage"]["completion_tokens"] for again in copies] == [2, 2]
    assert [again.complete(**ASKED).usage.completion_tokens for again in people] == [2, 2]
    person = llm.load_model(tmp_path / "saved", max_num_seqs=3)
    assert pickle.loads(pickle.dumps(person)).settings.max_num_seqs == 3


SHOW = """
from mlflow_llm.flavors.llm.predict import signature_enforcement
print(type(model.get_raw_model()).__name__, signature_enforcement.installed)
"""


def test_a_copy_in_another_process(loaded: mlflow.pyfunc.PyFuncModel, tmp_path: Path) -> None:
    """A pickled model loads in a process that has not imported the flavor, and enforces its signature there too."""
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(loaded))
    code = f"import pickle, sys\nmodel = pickle.load(open(sys.argv[1], 'rb'))\n{SHOW}"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "model.pickle")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["LanguageModel", "True"], done.stderr


def test_a_copy_where_the_files_are_not(store: Any, llama_dir: Path, tmp_path: Path) -> None:
    """A copy without its files is fetched again by its URI; without a URI, or with one of another model, the error says
    what to do."""
    with mlflow.start_run():
        info = llm.log_model(model=llama_dir, name="model")
    root = shutil.copytree(mlflow.artifacts.download_artifacts(info.model_uri), tmp_path / "here")
    bundle = llm.load_bundle(root)
    known = session.Session(bundle, EngineSettings(), uri=info.model_uri)
    unknown = session.Session(bundle, EngineSettings())
    other = session.Session(msgspec.structs.replace(bundle, content_hash="x" * 64), EngineSettings(), uri=known.uri)
    reported = [pickle.dumps(one) for one in (known, unknown, other)]
    shutil.rmtree(root)
    again = pickle.loads(reported[0])
    assert (Path(again.bundle.model_dir).is_dir(), again.bundle.content_hash) == (True, bundle.content_hash)
    with pytest.raises(MlflowException, match=f"there is no {root}"):
        pickle.loads(reported[1])
    with pytest.raises(MlflowException, match="no longer the model"):
        pickle.loads(reported[2])


def test_errors_cross_processes() -> None:
    """Errors raised in a worker's process survive pickling, with all their fields."""
    for error in (InvalidField("n", -1, "1 or more"), Overloaded("busy", retry_after=2.0), NotFound("no", param="x")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        reported = pickle.loads(pickle.dumps(mlflow_error(error)))
        assert (reported.message, reported.get_http_status_code()) == (error.message, error.status)
