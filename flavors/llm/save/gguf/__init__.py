"""GGUF files: their keys, RoPE scaling, tokenizers and weights, read as llama.cpp reads them."""
