from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from deploy.facts import ServedModel
from deploy.openai.ingress import create_app
from deploy.openai.service import OpenAIService, ServiceOptions
from deploy.recovery import RecoveryPolicy
from deploy.text import TextProcessor
from tests.tiny import VOCAB_SIZE, byte_tokenizer
from tests.unit.deploy.fakes import ScriptedEngine

SERVED = ServedModel(
    name="tiny",
    tokenizer="",
    tokenizer_revision=None,
    max_model_len=128,
    vocab_size=VOCAB_SIZE,
    num_speculative_tokens=4,
    max_logprobs=5,
)
FAST = RecoveryPolicy(max_losses=2, patience_s=0.2, first_delay_s=0.001, max_delay_s=0.01)


@pytest.fixture(scope="session")
def text() -> TextProcessor:
    return TextProcessor(byte_tokenizer())


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("Hello world")


Connect = Callable[..., httpx.AsyncClient]


@pytest.fixture
def connect(engine: ScriptedEngine, text: TextProcessor) -> Connect:
    """An HTTP client of the application over the scripted engine, no network, no Ray."""

    def make(
        options: ServiceOptions | None = None,
        api_keys: tuple[str, ...] = (),
        allowed_origins: tuple[str, ...] = (),
        prefix: str = "",
    ) -> httpx.AsyncClient:
        service = OpenAIService(engine, text, SERVED, options or ServiceOptions(recovery=FAST))
        app = create_app(service, api_keys, allowed_origins)
        return httpx.AsyncClient(
            # As Serve does behind a route prefix: the path keeps it.
            transport=httpx.ASGITransport(app, root_path=prefix),
            base_url=f"http://test{prefix}",
        )

    return make
