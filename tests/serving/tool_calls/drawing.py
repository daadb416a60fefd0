"""Texts drawn at random within a grammar: what a model without any sense would write."""

from __future__ import annotations

import functools
import random

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from reading_aloud import Read
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlflow_llm.serving.engine.constraints.grammar_tokenizer import make
from mlflow_llm.serving.tool_calls.formats import FORMATS
from mlflow_llm.serving.tool_calls.parser import make_parser, special_stand_ins

CORPUS = ['<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}</tool_call> true false null <parameter=x>'] * 5
MARKS = sorted({mark.strip() for format in FORMATS.values() for mark in format.literals if mark.strip()})
SPECIAL = (
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<|channel|>"),
    *("<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)


class Vocabulary:
    """A byte-level tokenizer of a few hundred tokens, ``special`` ones among them."""

    def __init__(self, special: tuple[str, ...]) -> None:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=380 + len(special),
            special_tokens=["<eos>", *special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(CORPUS, trainer)
        self.backend = backend
        self.special = {token: backend.token_to_id(token) for token in ("<eos>", *special)}
        again = Tokenizer.from_str(backend.to_str())
        self.grammar = make(again, frozenset(self.special.values()), backend.get_vocab_size())

    def ids(self, text):
        """Return the token ids of a text, with special tokens as such."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def matcher(self, grammar):
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self.grammar.matched, grammar.source, limits=limits, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, grammar, text):
        """Return whether the grammar accepts ``text`` as a whole."""
        matcher, ids = self.matcher(grammar), self.ids(text)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def draw(self, grammar, seed, stop=0.3, maximum=500):
        """Return drawn token ids and whether they are complete. ``stop`` is the probability of a possible end."""
        matcher, rng, ids = self.matcher(grammar), random.Random(seed), []
        end = self.grammar.vocab_size
        bits = np.zeros(end // 32 + 1, dtype=np.uint32)
        while len(ids) < maximum:
            if matcher.is_stopped():
                return ids, True
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: end + 1]).tolist()
            if end in allowed and (len(allowed) == 1 or rng.random() < stop):
                return ids, True
            allowed = [i for i in allowed if i != end]
            assert allowed, "the grammar allows no token here"
            some = self._mark(matcher, rng) or [rng.choice(allowed)]
            assert matcher.consume_tokens(some)
            ids += some
        return ids, False

    def _mark(self, matcher, rng):
        """Return an occasional marker, which random letters would never make."""
        if rng.random() < 0.75:
            return []
        marks = (self.ids(mark) for mark in rng.sample(['"', "}", "]", *MARKS], len(MARKS) + 3))
        return next((ids for ids in marks if matcher.validate_tokens(ids) == len(ids)), [])

    def read(self, ids, format, tools):
        """Parse the tokens, with the special tokens known to the parser."""
        stand_ins = special_stand_ins(self.special, format)
        parser, out = make_parser(format, tools, specials=stand_ins), Read()
        names = {token_id: token for token, token_id in self.special.items()}
        plain = []
        for token_id in [*ids, None]:
            if token_id is not None and token_id not in names:
                plain.append(token_id)
                continue
            out.add(parser.push(self.backend.decode(plain, skip_special_tokens=False)))
            plain = []
            if token_id is not None:
                out.add(parser.push(stand_ins.get(names[token_id], "")))
        out.add(parser.flush(False))
        return out


@functools.cache
def vocabulary(special):
    """Return a vocabulary with the formats' markers as special tokens, or without."""
    return Vocabulary(SPECIAL if special else ())
