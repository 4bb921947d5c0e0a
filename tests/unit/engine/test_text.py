"""Detokenising and stop strings under any grouping of tokens into runs."""

import random
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.requests import FinishReason
from actors.verifier.detokenize import Detokenizer, StopMatch, StopStrings, TextStream, TokenText
from actors.verifier.finish import FinishRules, decode_run, end_run

SPECIAL = ["<bos>", "<eos>", "<eot>"]


def byte_tokenizer():
    """One token a byte, then special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return tokenizer


def piece_tokenizer():
    """Sentencepiece style: words carry a leading space, bytes are a fallback."""
    words = ["<unk>"] + [f"<0x{i:02X}>" for i in range(256)]
    words += ["\u2581", "\u2581hello", "\u2581world", "ing", "\u2581a", "b", "!", "\u4f60"]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return tokenizer


BYTES = byte_tokenizer()
PIECES = piece_tokenizer()
TEXTS = [
    "plain ascii text",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 family \U0001f600\U0001f680",
    "caf\u00e9 \u00df \u0416",
    " leading and trailing ",
    "\ufffd is a real character \ufffd\ufffd\ufffd\ufffd\ufffd end",
    "a\n\nb\t c",
]


def groupings(ids, rng, num_random=6):
    for size in range(1, 6):
        yield [ids[i : i + size] for i in range(0, len(ids), size)]
    for _ in range(num_random):
        out, at = [], 0
        while at < len(ids):
            step = rng.randint(1, 9)
            out.append(ids[at : at + step])
            at += step
        yield out


def streamed(tokenizer, runs, skip=True):
    detokenizer = Detokenizer(TokenText(tokenizer), skip)
    pieces = [detokenizer.push(run) for run in runs]
    return pieces, detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_any_grouping_gives_the_full_decode(text):
    rng = random.Random(1)
    ids = BYTES.encode(text).ids
    for cut in {len(ids), len(ids) - 1, len(ids) - 2, len(ids) // 2}:
        full = BYTES.decode(ids[:cut])
        for runs in groupings(ids[:cut], rng):
            pieces, tail = streamed(BYTES, runs)
            assert "".join(pieces) + tail == full
            if "\ufffd" not in full:
                assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_inside_a_character_is_no_error():
    ids = BYTES.encode("ok \U0001f600").ids[:-1]
    pieces, tail = streamed(BYTES, [ids])
    assert pieces == ["ok "] and tail == "\ufffd"


def test_random_token_sequences_do_not_depend_on_grouping():
    rng = random.Random(2)
    for tokenizer in (BYTES, PIECES):
        size = tokenizer.get_vocab_size()
        for _ in range(60):
            ids = [rng.randrange(size) for _ in range(rng.randint(1, 40))]
            texts = set()
            for runs in groupings(ids, rng, 3):
                pieces, tail = streamed(tokenizer, runs)
                texts.add("".join(pieces) + tail)
            assert len(texts) == 1
            if tokenizer is BYTES:
                assert texts == {BYTES.decode(ids)}


def test_leading_space_tokens_and_byte_fallback():
    rng = random.Random(3)
    words = [257 + i for i in range(8)]
    emoji = [1 + b for b in "\U0001f600".encode()]
    for _ in range(100):
        ids = [t for _ in range(8) for t in rng.choice([[w] for w in words] + [emoji])]
        for runs in groupings(ids, rng, 2):
            pieces, tail = streamed(PIECES, runs)
            assert "".join(pieces) + tail == PIECES.decode(ids)


def test_special_tokens_are_left_out_or_kept_and_cost_no_memory():
    eos = BYTES.token_to_id("<eos>")
    ids = [*BYTES.encode("a").ids, eos, *BYTES.encode("b").ids]
    assert "".join(streamed(BYTES, [ids])[0]) == "ab"
    assert "".join(streamed(BYTES, [ids], skip=False)[0]) == "a<eos>b"
    detokenizer = Detokenizer(TokenText(BYTES), True)
    detokenizer.push([eos] * 1000 + [BYTES.encode("\u00e9").ids[0]] * 200)
    assert len(detokenizer._ids) < 40


# --- stop strings -----------------------------------------------------------------------------


def feed(stops, text, sizes, include=False):
    matcher = StopStrings(stops, include)
    out, at = [], 0
    for size in sizes:
        got = matcher.push(text[at : at + size])
        at += size
        if isinstance(got, StopMatch):
            return "".join([*out, got.text]), got.stop
        out.append(got)
    return "".join(out) + matcher.flush(), None


def first_stop(stops, text):
    """By character: the first end of any stop string; among those the earliest start."""
    for end in range(1, len(text) + 1):
        starts = [(end - len(s), s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


def test_stop_strings_at_every_split_equal_a_search_character_by_character():
    rng = random.Random(4)
    found = 0
    for _ in range(2000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(1, 15)))
        first = first_stop(stops, text)
        got = feed(stops, text, [1] * len(text))
        if first is None:
            assert got == (text, None)
        else:
            found += 1
            start, stop = first
            assert got == (text[:start], stop)
            assert feed(stops, text, [1] * len(text), include=True)[0] == (text[:start] + stop)
    assert 500 < found < 2000


def naive_push(stops, seen, out_len, piece, enabled, include):
    """One piece by plain search: (text that goes out, the stop or None)."""
    text = seen + piece
    if enabled:
        ends = [
            (end - len(s), i, s)
            for end in range(len(seen) + 1, len(text) + 1)
            for i, s in enumerate(stops)
            if text[:end].endswith(s)
        ]
        if ends:
            start, _, stop = min(ends)
            return text[out_len : start + (len(stop) if include else 0)], stop
    possible = [n for s in stops for n in range(len(s)) if text.endswith(s[:n])]
    return text[out_len : len(text) - max(possible)], None


def test_pieces_of_any_length_equal_a_plain_search():
    rng = random.Random(8)
    found = passed_over = 0
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        include = rng.random() < 0.5
        matcher, seen, out = StopStrings(stops, include), "", ""
        while len(seen) < 40:
            piece = "".join(rng.choices("aabbc", k=rng.randint(0, 7)))
            enabled = rng.random() < 0.5
            text, stop = naive_push(stops, seen, len(out), piece, enabled, include)
            got = matcher.push(piece, enabled)
            assert got == (text if stop is None else StopMatch(text, stop)), (stops, seen, piece)
            seen, out = seen + piece, out + text
            if stop is not None:
                found += 1
                break
            passed_over += any(s in seen for s in stops)
        else:
            assert out + matcher.flush() == seen
    assert found > 1000 and passed_over > 1000


def num_lines_run(call):
    """Lines of the tested module that `call` runs: its cost, without a clock."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith("detokenize.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", ["xyz ", "aaaa", "aaab", "abab"])
def test_a_long_stop_string_costs_no_more_than_a_short_one(text):
    def cost(length, num_pieces):
        matcher = StopStrings(["a" * length + "b", "ab" * length + "c"], False)
        return num_lines_run(lambda: [matcher.push(text) for _ in range(num_pieces)])

    assert cost(20_000, 500) < 1.5 * cost(20, 500) + 1000
    assert cost(20_000, 2000) < 5 * cost(20_000, 500)


def test_stop_ids_are_put_together_once():
    rules = FinishRules(9, eos_token_ids=frozenset([1]), stop_token_ids=frozenset([2]))
    assert rules.ending_ids == {1, 2} and rules.ending_ids is rules.ending_ids


def test_text_that_could_become_a_stop_is_held_back():
    matcher = StopStrings(["<END>"], False)
    assert matcher.push("a<") == "a"
    assert matcher.push("E") == ""
    assert matcher.push("x<END") == "<Ex"
    assert matcher.push(">z") == StopMatch("", "<END>")


# --- the end of a run -------------------------------------------------------------------------


def generate(ids, runs, rules, stops=(), skip=True):
    """All runs through `end_run`, as the loop does it."""
    stream = TextStream(Detokenizer(TokenText(BYTES), skip), stops, rules.include_stop_in_text)
    out, text = [], ""
    for run in runs:
        end = end_run(rules, len(out), run, stream)
        kept = run[: end.num_tokens]
        out += kept
        text += (
            end.text if end.text is not None else decode_run(rules, kept, end.finish_reason, stream)
        )
        if end.finish_reason is not None:
            return out, text, end.finish_reason, end.stop_reason
    raise AssertionError("no end")


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_ids_and_text_in_any_grouping(include):
    rng = random.Random(5)
    rules = FinishRules(100, include_stop_in_text=include)
    ids = BYTES.encode("aa<END>bb\u4f60" * 20).ids[:120]
    for runs in groupings(ids, rng, 20):
        out, text, reason, stop = generate(ids, runs, rules, ("<END>",))
        assert out == ids[:7]
        assert text == ("aa<END>" if include else "aa")
        assert (reason, stop) == (FinishReason.STOP, "<END>")


def test_min_tokens_delays_stop_strings_exactly():
    rng = random.Random(6)
    ids = BYTES.encode("x\n" * 30).ids
    for min_tokens in range(12):
        rules = FinishRules(50, min_tokens=min_tokens)
        count = max(2, min_tokens + min_tokens % 2)
        for runs in groupings(ids, rng, 4):
            out, text, reason, _ = generate(ids, runs, rules, ("\n",))
            assert len(out) == count and reason == FinishReason.STOP
            assert text == BYTES.decode(ids[: count - 1])


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_eos_stop_ids_and_budget_at_every_place_of_a_run(stops):
    rng = random.Random(7)
    eos, eot = BYTES.token_to_id("<eos>"), BYTES.token_to_id("<eot>")
    body = BYTES.encode("n\u00e9v" * 10).ids
    for place in range(12):
        for end_id, reason, why in (
            (eos, FinishReason.STOP, None),
            (eot, FinishReason.STOP, eot),
            (None, FinishReason.LENGTH, None),
        ):
            ids = list(body)
            if end_id is not None:
                ids[place] = end_id
            max_tokens = 30 if end_id is not None else place + 1
            rules = FinishRules(max_tokens, 0, frozenset([eos]), frozenset([eot]))
            for runs in groupings(ids, rng, 2):
                out, text, got, stop = generate(ids, runs, rules, stops)
                assert out == ids[: place + 1] and (got, stop) == (reason, why)
                assert text == BYTES.decode(ids[: place + 1])


def test_the_stopping_token_is_no_text_unless_asked_for():
    a = BYTES.encode("a").ids
    x = BYTES.encode("x").ids[0]
    for stops in ((), ("never",)):
        for include in (False, True):
            rules = FinishRules(9, stop_token_ids=frozenset([x]), include_stop_in_text=include)
            out, text, _, why = generate(None, [[*a, x, *a]], rules, stops)
            assert out == [*a, x] and why == x
            assert text == ("ax" if include else "a")


def test_stop_ids_below_min_tokens_are_passed_over():
    """The target masks them; if one comes all the same it does not end the request."""
    eos = BYTES.token_to_id("<eos>")
    for min_tokens in range(6):
        rules = FinishRules(20, min_tokens, frozenset([eos]))
        out, _, reason, _ = generate(None, [[eos] * 4, [eos] * 4], rules)
        assert len(out) == min_tokens + 1 and reason == FinishReason.STOP
