"""Architectures of GGUF files that are not read, by llama.cpp's names: their family, and what can be served instead."""

from __future__ import annotations

SERVED = {
    "cohere2": "Cohere 2",
    "command-r": "Cohere",
    "deepseek2": "DeepSeek V2 or V3",
    "ernie4_5": "ERNIE 4.5",
    "exaone4": "EXAONE 4",
    "gemma": "Gemma",
    "gemma3n": "Gemma 3n",
    "gemma4": "Gemma 4",
    "glm4": "GLM-4",
    "gpt-oss": "gpt-oss",
    "gptneox": "GPT-NeoX",
    "granite": "Granite",
    "minimax-m2": "MiniMax-M2",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "phi2": "Phi",
    "smollm3": "SmolLM3",
}
_ATTENTION = "transformers offers no way to replace its attention"
_STATE = "it keeps a recurrent state, which is no KV cache"
NOT_SERVED = {
    "bloom": ("Bloom", _ATTENTION),
    "falcon": ("Falcon", _ATTENTION),
    "mpt": ("MPT", _ATTENTION),
    "lfm2": ("LFM2", "it has layers of type conv"),
    "llama4": ("Llama 4", "it has layers of type chunked_attention"),
    "mamba": ("Mamba", _STATE),
    "mamba2": ("Mamba 2", _STATE),
    "t5": ("T5", "it is an encoder with a decoder"),
    "t5encoder": ("T5", "it is the encoder of a model with a decoder"),
}


def reason(architecture: str, read: list[str]) -> str:
    """Return why a file of ``architecture`` is refused, and what to use instead; ``read`` are those that are read."""
    if family := SERVED.get(architecture):
        return f"{family} is served, but not from a GGUF file; log the checkpoint that the file was made of"
    if architecture in NOT_SERVED:
        family, why = NOT_SERVED[architecture]
        return f"{family} is served in no form: {why}; log a model of another family"
    return f"expected one of {', '.join(read)}; log the checkpoint that the file was made of, if its family is served"
