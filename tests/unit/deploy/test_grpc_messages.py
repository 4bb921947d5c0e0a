"""The gRPC messages carry all of a request and of a run, and the generated code is the file's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc_tools.protoc
import pytest
from google.protobuf import descriptor_pb2

from actors.errors import InvalidRequest
from actors.requests import (
    FinishReason,
    GenerateRequest,
    RunOutput,
    SpeculationStats,
    TokenLogprob,
)
from deploy.failures import Failure
from deploy.grpc import paceline_pb2 as pb
from deploy.grpc.messages import (
    conversation_of,
    from_conversation,
    from_generate_request,
    from_prompt,
    prompt_of,
    to_answer,
    to_generate_request,
    to_run,
)
from deploy.grpc.status import CODES
from deploy.text import Conversation, Message, Text

ROOT = Path(__file__).parents[3]
# Of a request's fields, those that no caller sets to sample; the last is of recovery.
APART = {"request_id", "prompt_token_ids", "num_prior_output_tokens"}
EVERY = GenerateRequest(
    "r", (), 7, 2, 0.5, 40, 0.9, 0.1, -3, ("a", "é"), (5, 6), True, True, False, 3, False, 2, "s"
)


def test_the_generated_code_is_that_of_the_file(tmp_path: Path) -> None:
    out = tmp_path / "set"
    includes = Path(grpc_tools.__file__).parent / "_proto"
    done = grpc_tools.protoc.main(
        ["", f"-I{ROOT}", f"-I{includes}", f"--descriptor_set_out={out}",
         str(ROOT / "deploy/grpc/paceline.proto")]
    )  # fmt: skip
    assert done == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    made = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    for message in file.message_type:  # a set names each field for JSON too
        for field in message.field:
            field.ClearField("json_name")
    assert made == file, "run `make proto`"


def test_every_sampling_field_goes_there_and_back() -> None:
    names = {field.name for field in dataclasses.fields(GenerateRequest)} - APART
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) == names
    for field in dataclasses.fields(GenerateRequest):
        if field.name not in APART:
            assert getattr(EVERY, field.name) != field.default, "a value that shows"
    sent = pb.Sampling.FromString(from_generate_request(EVERY).SerializeToString())
    assert to_generate_request(sent, "r") == EVERY
    assert from_generate_request(GenerateRequest("r", ())) == pb.Sampling()
    assert to_generate_request(pb.Sampling(), "r") == GenerateRequest("r", ())


@pytest.mark.parametrize("field", ["top_k", "seed", "stop"])
def test_a_value_that_no_message_holds_is_named(field: str) -> None:
    value = {"top_k": -1, "seed": 2**64, "stop": "x\ud800"}[field]
    given = (value,) if field == "stop" else value
    with pytest.raises(InvalidRequest, match=field):
        from_generate_request(dataclasses.replace(EVERY, **{field: given}))


@pytest.mark.parametrize("prompt", [Text("hé"), Text("", False), [1, 2, 70000]])
def test_prompts_go_there_and_back(prompt: Text | list[int]) -> None:
    assert prompt_of(from_prompt(prompt, pb.Sampling())) == prompt


def test_conversations_go_there_and_back() -> None:
    turns = [Message("system", "s"), Message("user", "u", "Ann")]
    chat = Conversation(turns, False, True, {"deep": {"list": [1, "a", None]}, "flag": True})
    assert conversation_of(from_conversation(chat, pb.Sampling())) == chat
    plain = Conversation(turns)
    assert conversation_of(from_conversation(plain, pb.Sampling())) == plain
    assert conversation_of(
        pb.ChatRequest(messages=[pb.Message(role="user", content="u")])
    ) == Conversation([Message("user", "u")])
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content"):
        from_conversation(Conversation([Message("user", [{"type": "text"}])]), pb.Sampling())


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'text' or 'token_ids' is required"):
        prompt_of(pb.GenerateRequest())


@pytest.mark.parametrize("stop", ["xy", 0, 7, None])
@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.LENGTH])
def test_runs_go_there_and_back(stop: str | int | None, reason: FinishReason | None) -> None:
    run = RunOutput(
        "r", (1, 2), "té", (True, False),
        (TokenLogprob(1, -0.5, ((1, -0.5), (3, -2.25))), TokenLogprob(2, -1.0)),
        9, 4, 2, reason, stop, SpeculationStats(1, 1, 4, 1, (1, 0, 0, 0)),
    )  # fmt: skip
    sent = pb.Answer.FromString(to_answer("r", run).SerializeToString())
    assert to_run(sent, with_logprobs=True) == run
    bare = dataclasses.replace(run, logprobs=None)
    assert to_run(to_answer("r", bare), with_logprobs=False) == bare


def test_every_failure_has_a_code_of_its_own() -> None:
    assert set(CODES) == set(Failure) and len(set(CODES.values())) == len(Failure)
