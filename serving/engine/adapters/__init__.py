"""LoRA adapters and learned prompts: files, registry, eviction, and their part of a step."""
