"""The answer of an interpreter to whether it can run engines in vLLM: ``python -m …survey`` prints a JSON object."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

from ...interface.errors import reason
from ...interface.settings import EngineSettings
from .options import set_environment


def survey() -> dict[str, Any]:
    """Return the versions and the platform of vLLM in this interpreter, or the ``reason`` why it cannot run engines."""
    set_environment(EngineSettings(engine="vllm"))
    found: dict[str, Any] = {"interpreter": sys.executable, "python": platform.python_version()}
    try:
        import torch
        import transformers
        import vllm
        from vllm import LLMEngine  # noqa: F401 (what an engine imports)
        from vllm.platforms import current_platform

        from . import race  # noqa: F401 (its logits processor)
    except Exception as error:  # another library's, as when versions do not go together
        return found | {"reason": f"{type(error).__name__}: {reason(error)}"}
    found |= {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"device": str(current_platform.device_type)}


if __name__ == "__main__":
    print(json.dumps(survey()))
