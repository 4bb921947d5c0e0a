"""Tiny random models and tokenizers, written like any Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIALS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIALS)
EOS_ID = 257
# For tests of drafts: drafts that are mostly wrong would soon not be made.
CONSTANT_K = {"num_speculative_tokens_schedule": "constant"}

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|eos|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer(*, chat_template: bool = True) -> Any:
    """One token per byte: id = byte. Every text round-trips, characters span tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    chars.update({b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in chars)})
    backend = Tokenizer(models.BPE({chars[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        chat_template=CHAT_TEMPLATE if chat_template else None,
    )


def write_tiny_model(directory: Path, *, seed: int = 0, num_layers: int = 2) -> Path:
    """A random Llama of a few hundred kilobytes with the byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        tie_word_embeddings=False,
        dtype="float32",
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    torch.random.set_rng_state(state)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def write_tiny_config(directory: Path) -> Path:
    """Only config.json and tokenizer: enough to resolve a configuration, no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "rms_norm_eps": 1e-6,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(directory)
    return directory
