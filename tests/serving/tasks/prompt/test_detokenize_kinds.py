"""A text that continues its prompt, with every kind of decoder that tokenizers has."""

import random

import pytest
from scripted_engine import ScriptedEngine, spoken
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import TokenLogprob, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.tasks.prompt.detokenize import starts
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.tasks.reply.generate import run

BYTES = {byte: f"<0x{byte:02X}>" for byte in range(256)}
WORDS = [
    *("▁", "▁▁", "▁▁▁", "▁Hello", "▁world", "world", "▁a▁b", "e", ".", "▁.", "'", "s", "##s", "##ing", "##", "the</w>"),
    *("w", "ld</w>", "</w>", "|", "<pad>", "a", "a|", " ", "\n", ",", " n't", "é", "Ġ", "Ġworld", "Ã", "©", "\ufffd"),
]
SPECIAL = ["<unk>", "<s>", "</s>"]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *BYTES.values(), *WORDS])}
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS = {
    "none": None,
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(LLAMA),
    "two spaces": decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
    "metaspace always": decoders.Metaspace(prepend_scheme="always"),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "word piece": decoders.WordPiece(),
    "word piece as it is": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "strip": decoders.Strip("▁", 1, 0),
    "replace": decoders.Replace("▁", " "),
    "fuse": decoders.Fuse(),
    "byte fallback": decoders.ByteFallback(),
    "byte level": decoders.ByteLevel(),
    "byte level in a sequence": decoders.Sequence([decoders.ByteLevel()]),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """Return the text model of one kind of decoder."""
    backend = Tokenizer(models.BPE(vocab=VOCAB, merges=[], unk_token="<unk>"))
    backend.add_special_tokens(SPECIAL)
    if KINDS[request.param] is not None:
        backend.decoder = KINDS[request.param]
    folder = tmp_path_factory.mktemp("kind")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    bundle = Bundle(content_hash="0" * 64, tasks=("completions",), model_dir=str(folder), tokenizer_dir=str(folder))
    return TextModel(bundle)


def _draws(seed):
    """Return prompts and texts of a few tokens that come again and again, and of whole characters in bytes."""
    draw = random.Random(seed)
    few = draw.sample([VOCAB[token] for token in [*WORDS, "<s>", "</s>"]], 6)
    units = [[token] for token in few] + [[VOCAB[BYTES[byte]] for byte in char.encode()] for char in "é語"]
    some = [[i for _ in range(draw.randrange(maximum)) for i in draw.choice(units)] for maximum in (6, 30)]
    return some[0], [*some[1], *draw.choice(units)]


def _request(prompt, **fields):
    sampling = Sampling(max_tokens=64, **fields.pop("sampling", {}))
    return ValidRequest(
        request_id="r", task="completions", model="m", continues_prompt=True, sampling=sampling,
        sequences=(Sequence(prompt_token_ids=tuple(prompt), resumed_token_ids=fields.pop("resumed", ())),), **fields
    )  # fmt: skip


def _text_of(kind, request, ids, **event):
    events = [
        Tokens(index=0, token_ids=(i,), logprobs=(TokenLogprob(i, -1.0),) if request.sampling.logprobs == 0 else ())
        for i in ids
    ]
    pieces = list(run(ScriptedEngine([*events, spoken(0, ())[-1]]), request, kind))
    return "".join(getattr(piece, "text", "") for piece in pieces), pieces


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("skip", [True, False])
def test_prompt_and_text_are_the_decode_of_the_whole(kind, seed, skip):
    """Streamed token by token, a text is what decoding prompt and text adds to decoding the prompt."""
    prompt, ids = _draws(seed)
    whole = kind.decode(prompt + ids, skip)
    begun = kind.detokenizer(skip, before=prompt).flush()  # a character that the prompt has begun
    before = kind.decode(prompt, skip).removesuffix(begun)
    made = kind.detokenizer(skip, before=prompt)
    assert before + "".join([*(made.push(i) for i in ids), made.flush()]) == whole


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_text_goes_on(kind, seed):
    """A text that is continued after an engine died is the text of all its tokens."""
    prompt, ids = _draws(seed)
    whole, _ = _text_of(kind, _request(prompt), ids)
    for cut in range(len(ids)):
        rest, _ = _text_of(kind, _request(prompt, resumed=tuple(ids[:cut])), ids[cut:])
        assert whole.endswith(rest)
        detokenizer = kind.detokenizer(before=prompt)
        assert "".join(detokenizer.push(i) for i in ids[:cut]) + rest == whole


@pytest.mark.parametrize("seed", range(20))
def test_offsets_with_an_echo(kind, seed):
    """Each token's log probability stands at its first character in the prompt and the text together."""
    prompt, ids = _draws(seed)
    prompt = prompt or [VOCAB["world"]]
    request = _request(prompt, echo=(kind.decode(prompt, False),), skip_special_tokens=False, sampling={"logprobs": 0})
    text, pieces = _text_of(kind, request, [i for i in ids if i != 2])
    entries = [entry for piece in pieces for entry in getattr(piece, "logprobs", ())]
    begun, length = starts(kind.detokenizer(False, before=prompt), [i for i in ids if i != 2])
    assert [entry.start for entry in entries] == [len(text) - length + start for start in begun]


def test_a_long_prompt_of_bytes(kind):
    """The context is found in a prompt that has nothing but bytes of characters, without half a character."""
    prompt = [VOCAB[BYTES[byte]] for byte in ("語é" * 50).encode()]
    ids = [VOCAB[BYTES[byte]] for byte in "é".encode()] + [VOCAB["▁world"]]
    made = kind.detokenizer(before=prompt)
    assert kind.decode(prompt) + "".join([*map(made.push, ids), made.flush()]) == kind.decode(prompt + ids)


def test_half_a_character_in_the_prompt(kind):
    """A character that the prompt begins is in the text, not in the echo."""
    prompt, rest = [VOCAB["world"], VOCAB["<0xC3>"]], [VOCAB["<0xA9>"], VOCAB["world"]]
    request = _request(prompt, echo=(kind.decode(prompt, False),))
    assert _text_of(kind, request, rest)[0] == kind.decode(prompt + rest)


def test_spaces_alone_before_a_text(kind):
    """A prompt of special tokens and spaces is what the whole begins with, so that a decoder may remove a space."""
    for prompt in ([1], [VOCAB["▁"]], [1, VOCAB["▁▁"]], []):
        made = kind.detokenizer(before=prompt)
        ids = [VOCAB["▁"]] * 80 + [VOCAB["▁world"]]
        assert kind.decode(prompt) + "".join([*map(made.push, ids), made.flush()]) == kind.decode(prompt + ids)


def test_a_turn_of_a_chat_is_a_text_of_its_own(kind):
    """The first word of a reply has the space that the decoder leaves it, whatever the template ended with."""
    request = ValidRequest(
        request_id="r", task="chat", model="m", sampling=Sampling(max_tokens=64),
        sequences=(Sequence(prompt_token_ids=(VOCAB["world"],)),),
    )  # fmt: skip
    assert _text_of(kind, request, [VOCAB["▁Hello"]])[0] == kind.decode([VOCAB["▁Hello"]])
