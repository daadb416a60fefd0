"""Building models one at a time in a process: transformers changes the class of all models while it loads one."""

import os
import signal
import threading
import time

import pytest
from tiny_models import make_model
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mlflow_llm.serving.engine.models.loader import from_pretrained
from mlflow_llm.serving.engine.models.resolved_settings import ResolvedSettings
from mlflow_llm.serving.engine.weights import config_bounds
from mlflow_llm.serving.interface.settings import EngineSettings

RESOLVED = ResolvedSettings.of(EngineSettings(dtype="float32"))


@pytest.fixture
def folder(tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    make_model(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(tmp_path)
    return str(tmp_path)


def test_no_other_thread_builds_while_one_does(folder):
    """No thread builds a model while another does, because ``tie_weights`` is removed from all models meanwhile."""
    tie_weights, taken = PreTrainedModel.tie_weights, []

    class Watched:
        @staticmethod
        def from_pretrained(*args, **kwargs):
            other = threading.Thread(target=lambda: taken.append(config_bounds.BUILDING.acquire(blocking=False)))
            other.start()
            other.join()
            return AutoModelForCausalLM.from_pretrained(*args, **kwargs)

    model = from_pretrained(Watched, folder, RESOLVED)
    assert taken == [False]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert PreTrainedModel.tie_weights is tie_weights


def test_models_of_many_threads_have_their_tied_heads(folder):
    """Models built by eight threads at once all have their tied heads."""
    models = []

    def load():
        models.append(from_pretrained(AutoModelForCausalLM, folder, RESOLVED))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [model.lm_head.weight is model.model.embed_tokens.weight for model in models] == [True] * 8


def test_a_process_that_is_forked_while_one_builds_builds_as_well(folder):
    """A process forked while a thread builds can build models with tied heads itself."""
    within = threading.Event()

    class Slow:
        @staticmethod
        def from_pretrained(*args, **kwargs):
            def slow(*_):
                if not within.is_set():
                    within.set()
                    time.sleep(0.5)

            hook = register_module_module_registration_hook(slow)
            try:
                return AutoModelForCausalLM.from_pretrained(*args, **kwargs)
            finally:
                hook.remove()

    other = threading.Thread(target=from_pretrained, args=(Slow, folder, RESOLVED))
    other.start()
    assert within.wait(120), "the thread never came to a module"
    child = os.fork()
    if not child:
        signal.alarm(120)  # ends a child that waits for a lock that nobody releases
        status = 1
        try:
            model = from_pretrained(AutoModelForCausalLM, folder, RESOLVED)
            status = 0 if model.lm_head.weight is model.model.embed_tokens.weight else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.join()
