"""A stream that moves to another engine says the same text, whatever the tokenizer, wherever it is
cut: inside a word, a character, or what may become a stop string."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from actors.requests import GenerateRequest, RunOutput
from actors.verifier.admission import admit
from actors.verifier.detokenize import TokenText
from actors.verifier.finish import decode_run, end_run
from deploy.recovery import RecoveryPolicy, generate_with_recovery
from deploy.text import TextProcessor
from deploy.token_bytes import BYTE_OF
from tests.unit.engine.fakes import make_limits

FAST = RecoveryPolicy(first_delay_s=0, max_delay_s=0)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
WORDS = ["Hello", "world", "how", "are", "you", "do", "n't", ".", ",", "!", "caf", "s", "\u4e16"]


def bpe(tokens: list[str], decoder: Any, **options: Any) -> Tokenizer:
    vocab = {token: n for n, token in enumerate(dict.fromkeys(["<unk>", *tokens]))}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", **options))
    made.decoder = decoder
    return made


def byte_level() -> Tokenizer:
    characters = list(BYTE_OF)
    spaced = ["\u0120" + word for word in WORDS if word.isascii()]
    return bpe([*characters, *filter(str.isascii, WORDS), *spaced], decoders.ByteLevel())


def _sentencepiece(*last: Any) -> Tokenizer:
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    pieces = [*BYTES, "\u2581", *WORDS, *("\u2581" + word for word in WORDS)]
    return bpe(pieces, decoders.Sequence(steps), byte_fallback=True)


def llama() -> Tokenizer:
    return _sentencepiece(decoders.Strip(" ", 1, 0))


def gemma() -> Tokenizer:
    return _sentencepiece()


def unigram() -> Tokenizer:
    pieces = ["<unk>", "\u2581", *WORDS, *("\u2581" + word for word in WORDS)]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, False))
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, *("##" + word for word in WORDS)]
    made = Tokenizer(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=True)
    return made


def suffixed() -> Tokenizer:
    return bpe([*WORDS, *(word + "</w>" for word in WORDS)], decoders.BPEDecoder("</w>"))


KINDS: list[Callable[[], Tokenizer]] = [byte_level, llama, gemma, unigram, word_piece, suffixed]


def script_of(tokenizer: Tokenizer) -> list[int]:
    """An answer of about 40 tokens: words, characters in pieces, bytes that are none, special
    tokens, and no space where a decoder would put or drop one."""
    tokenizer.add_special_tokens(["<|x|>"])
    tokenizer.add_tokens([AddedToken("<plain>", normalized=False)])
    vocab = tokenizer.get_vocab()
    marks = ["\u2581", "\u0120", "", "##"]
    spelt = []
    for number, word in enumerate([*WORDS, *WORDS[:5]]):
        forms = [mark + word for mark in marks[number % 2 :] if mark + word in vocab]
        forms += [form for form in (word + "</w>", word) if form in vocab]
        spelt += forms[:1]
        if number % 4 == 1:
            spelt += [f"<0x{byte:02X}>" for byte in "\U0001f99c\u00e9".encode()]
            if isinstance(tokenizer.decoder, decoders.ByteLevel):
                spelt += [_CHARACTER_OF[byte] for byte in "\U0001f99c".encode()]
        if number % 6 == 2:
            spelt += ["<|x|>", "\u2581", "\u0120", "<plain>", "<0xFF>", "<0xE4>"]
    return [vocab[token] for token in spelt if token in vocab]


class Engines:
    """Engines that say `script` through the engine's own text path; the first is lost after
    `lost_after` runs."""

    def __init__(self, tokenizer: Tokenizer, script: list[int], lost_after: int, run_length: int):
        self._tokens = TokenText(tokenizer)
        self._script = script
        self._lost_after = lost_after
        self._run_length = run_length
        self._limits = make_limits(vocab_size=tokenizer.get_vocab_size(), max_model_len=512)
        self.num_tries = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RunOutput]:
        self.num_tries += 1
        rules, text = admit(request, self._limits, self._tokens)
        assert text is not None
        num_said = len(request.prompt_token_ids) - 1
        left = self._script[num_said:]
        num_output = 0
        for number, at in enumerate(range(0, len(left), self._run_length)):
            if self.num_tries == 1 and number == self._lost_after:
                raise ActorDiedError()
            run = left[at : at + self._run_length]
            end = end_run(rules, num_output, run, text)
            run = run[: end.num_tokens]
            num_output += len(run)
            said = end.text
            if said is None:
                said = decode_run(rules, run, end.finish_reason, text)
            yield RunOutput(
                request.request_id, tuple(run), said, (False,) * len(run), None,
                len(request.prompt_token_ids), 0, num_output, end.finish_reason, end.stop_reason,
            )  # fmt: skip
            if end.finish_reason is not None:
                return


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stop", [(), ("wor", "xyz"), (" world how areyou never",)], ids=str)
@pytest.mark.parametrize("skip", [True, False])
def test_the_same_text_wherever_it_is_cut(kind: Any, stop: tuple[str, ...], skip: bool) -> None:
    tokenizer = kind()
    script = script_of(tokenizer)
    assert len(script) > 12
    text = TextProcessor(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    request = GenerateRequest(
        "r", [1], len(script), seed=7, stop=stop, skip_special_tokens=skip, ignore_eos=True
    )

    async def say(lost_after: int, run_length: int) -> tuple[str, list[int], Any]:
        engines = Engines(tokenizer, script, lost_after, run_length)
        runs = [
            run async for run in generate_with_recovery(engines, request, text.detokenizer_of, FAST)
        ]
        tokens = [token for run in runs for token in run.token_ids]
        assert engines.num_tries == 1 or lost_after >= 0
        return "".join(run.text for run in runs), tokens, runs[-1].stop_reason

    async def go() -> None:
        expected = await say(-1, 1)
        assert len(expected[0]) > 4
        if not stop:
            decoded = tokenizer.decode(script, skip_special_tokens=skip)
            assert expected[0] == decoded and expected[1] == script
        for run_length in (1, 3):
            for lost_after in range(len(expected[1]) // run_length):
                said = await say(lost_after, run_length)
                assert said == expected, f"cut after {lost_after} runs of {run_length}"

    asyncio.run(go())
