"""The bytes a token adds to the text.

Logprobs and recovery need them: one character can span tokens, and one token's bytes need not be
text.
"""

from __future__ import annotations

import json
from typing import Any


class TokenBytes:
    """The bytes of a vocabulary's tokens.

    Byte-level vocabularies write bytes as printable characters, SentencePiece ones write spaces
    as a marker and odd bytes as <0xNN>; everything else is decoded token by token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.dumps(
            json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"), ensure_ascii=False
        )
        self._byte_level = '"ByteLevel"' in decoder
        self._byte_fallback = '"ByteFallback"' in decoder
        self._sentencepiece = '"Metaspace"' in decoder or "\u2581" in decoder
        self._added = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._special = frozenset(
            int(i)
            for i, t in tokenizer.added_tokens_decoder.items()
            if getattr(t, "special", False)
        ) | frozenset(tokenizer.all_special_ids)
        self._size = len(tokenizer)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` drops this token from the text."""
        return token_id in self._special

    def __call__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        # Ids past the vocabulary exist when the embedding is padded; they have no text.
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self._size else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_OF[char] for char in token)
            except KeyError:
                return str(token).encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            return bytes([int(token[3:5], 16)])
        if self._sentencepiece:
            return str(token).replace("\u2581", " ").encode()
        decoded: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return decoded.encode()


def _bytes_as_characters() -> dict[str, int]:
    """Printable character of each byte in byte-level vocabularies, inverted.

    Bytes that are printable in Latin-1 stand for themselves, the others are moved to 256 and up
    in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + n): byte for n, byte in enumerate(moved)})
    return table


BYTE_OF = _bytes_as_characters()
