"""API keys: one of them is presented with every call, on HTTP and gRPC alike."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence

from deploy.failures import Unauthenticated


class ApiKeys:
    """The keys of a server; none: everybody may call."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_environment(cls, variable: str | None) -> ApiKeys:
        """Keys of the environment variable named by `api_keys_env`, separated by commas.

        Raises:
            ValueError: The variable is named but empty: starting open would be a nasty surprise.
        """
        if variable is None:
            return cls()
        keys = tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())
        if not keys:
            raise ValueError(
                f"api_keys_env names {variable}, but that variable is not set in the ingress "
                "replica; set it (runtime_env.env_vars or the container) or remove api_keys_env"
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str) -> None:
        """Check the value of an `Authorization` header or of the metadata of that name.

        Raises:
            Unauthenticated: no key, or none of ours.
        """
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refusal("no API key given; send 'Authorization: Bearer KEY'")
        if not self._is_known(key.strip()):
            raise _refusal("the API key is not valid")

    def _is_known(self, key: str) -> bool:
        # Digests of equal length, all compared: time tells neither length nor position.
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _refusal(message: str) -> Unauthenticated:
    return Unauthenticated(message, code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
