"""From messages to token ids and back: templates, conversations, tokenizers, detokenising."""
