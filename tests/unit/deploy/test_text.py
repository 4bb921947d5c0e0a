from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from actors.errors import InvalidRequest, LoadError
from deploy.text import Conversation, TextProcessor, messages_of
from deploy.token_bytes import TokenBytes
from tests.tiny import byte_tokenizer


def render(text: TextProcessor, *turns: dict, **kwargs) -> str:
    return text.decode(text.ids_of(Conversation(messages_of(turns), **kwargs)))


def test_turns_are_rendered_by_the_model_s_chat_template(text: TextProcessor) -> None:
    turns = (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    )
    assert render(text, *turns) == (
        "<|bos|><|system|>Be brief.<|user|>ab<|assistant|>c<|eos|><|user|>d<|assistant|>"
    )
    assert render(text, *turns, add_generation_prompt=False).endswith("<|user|>d")
    continued = render(text, *turns[:3], continue_final_message=True)
    assert continued.endswith("<|assistant|>c")


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]},
         "messages[0].content[0].b"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "name": 5}, "messages[0].name"),
        ({"role": "user", "text": "x"}, "messages[0].text"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "\ud83d"}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_is_not_text_is_refused_by_name(text: TextProcessor, turn: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(text, turn)
    assert caught.value.param == param


def test_an_empty_conversation_and_one_that_cannot_be_continued(text: TextProcessor) -> None:
    with pytest.raises(InvalidRequest, match="'messages' is empty"):
        render(text)
    with pytest.raises(InvalidRequest, match="not an assistant's") as caught:
        render(text, {"role": "user", "content": "a"}, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_conversation_the_template_refuses(text: TextProcessor) -> None:
    with pytest.raises(InvalidRequest, match="must come first"):
        render(text, {"role": "user", "content": "a"}, {"role": "system", "content": "b"})


def test_a_model_without_a_chat_template_refuses_conversations() -> None:
    plain = TextProcessor(byte_tokenizer(chat_template=False))
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(plain, {"role": "user", "content": "a"})


def test_template_arguments_the_server_sets_are_refused(text: TextProcessor) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(text, {"role": "user", "content": "a"}, template_kwargs={"tokenize": True})
    assert caught.value.param == "chat_template_kwargs.tokenize"


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path) -> None:
    with pytest.raises(LoadError, match="no tokenizer"):
        TextProcessor.load(str(tmp_path))


def test_saved_tokenizer_loads_and_round_trips(tmp_path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = TextProcessor.load(str(tmp_path))
    for sample in ("hi", "é世🦜", "  two  spaces \n\t", "a , b ."):
        ids = loaded.encode(sample)
        assert loaded.decode(ids) == sample
        assert b"".join(map(loaded.token_bytes, ids)) == sample.encode()


def test_bytes_of_a_sentencepiece_like_vocabulary() -> None:
    vocab = {"<unk>": 0, "\u2581Hello": 1, "<0xC3>": 2, "<0xA9>": 3, "lo": 4}
    backend = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [token_bytes(i) for i in (1, 2, 3, 4)] == [b" Hello", b"\xc3", b"\xa9", b"lo"]
    assert token_bytes(99) == b""


def test_special_tokens_are_known_and_have_their_text(text: TextProcessor) -> None:
    assert text.token_bytes.is_special(257)
    assert not text.token_bytes.is_special(65)
    assert text.token_bytes(257) == b"<|eos|>"
