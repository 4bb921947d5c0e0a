"""The way through a Serve handle: no HTTP in between, the checks and the recovery run here."""

from __future__ import annotations

from deploy.engine_client import EngineClient, HandleEngineClient
from deploy.facts import ServedModel
from deploy.front import Front
from deploy.text import TextProcessor
from specconfig.app_args import ENGINE


async def open_handle(app_name: str, timeout_s: float) -> Front:
    """A front in this process over the engines of `app_name`."""
    from ray import serve

    handle = serve.get_deployment_handle(ENGINE, app_name)
    return await front_over(HandleEngineClient(handle), timeout_s)


async def front_over(engines: EngineClient, timeout_s: float) -> Front:
    """A front over `engines`, which say themselves what they serve."""
    facts = await engines.describe(timeout_s)
    served = ServedModel(**facts["served"])
    return Front(engines, TextProcessor.load(served.tokenizer, served.tokenizer_revision), served)
