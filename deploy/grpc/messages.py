"""Between `paceline.v1` messages and the engine's own types, in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf import json_format

from actors.errors import InvalidRequest
from actors.requests import (
    FinishReason,
    GenerateRequest,
    RunOutput,
    SpeculationStats,
    TokenLogprob,
)
from deploy.grpc import paceline_pb2 as pb
from deploy.text import Conversation, Message, Prompt, Text

_REPEATED: Final = ("stop", "stop_token_ids")
_FINISH: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISHED: Final = {code: reason for reason, code in _FINISH.items()}


def to_generate_request(sampling: pb.Sampling, request_id: str) -> GenerateRequest:
    """The engine's request, without its prompt."""
    fields: dict[str, Any] = {field.name: value for field, value in sampling.ListFields()}
    for name in _REPEATED:
        fields[name] = tuple(fields.get(name, ()))
    return GenerateRequest(request_id, (), **fields)


def from_generate_request(request: GenerateRequest) -> pb.Sampling:
    """What differs from the engine's defaults.

    Raises:
        InvalidRequest: a value that its field cannot carry.
    """
    sampling = pb.Sampling()
    for name in pb.Sampling.DESCRIPTOR.fields_by_name:
        value = getattr(request, name)
        if value == _DEFAULTS[name]:
            continue
        try:
            if name in _REPEATED:
                getattr(sampling, name).extend(value)
            else:
                setattr(sampling, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"'{name}' is {value!r}: {error}", param=name) from None
    return sampling


_DEFAULTS: Final = {
    field.name: field.default
    for field in dataclasses.fields(GenerateRequest)
    if field.default is not dataclasses.MISSING
}


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """The prompt in the form it came in.

    Raises:
        InvalidRequest: neither text nor token ids.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("'text' or 'token_ids' is required", param="text")
    if kind == "token_ids":
        return list(request.token_ids.ids)
    adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
    return Text(request.text, adds)


def conversation_of(request: pb.ChatRequest) -> Conversation:
    """The conversation of a chat request."""
    asks = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
    return Conversation(
        [Message(turn.role, turn.content, turn.name or None) for turn in request.messages],
        asks,
        request.continue_final_message,
        json_format.MessageToDict(request.chat_template_kwargs),
    )


def from_prompt(prompt: Text | Sequence[int], sampling: pb.Sampling) -> pb.GenerateRequest:
    """A generate request of text or token ids."""
    if isinstance(prompt, Text):
        return pb.GenerateRequest(
            text=prompt.text, add_special_tokens=prompt.add_special_tokens, sampling=sampling
        )
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


def from_conversation(chat: Conversation, sampling: pb.Sampling) -> pb.ChatRequest:
    """A chat request.

    Raises:
        InvalidRequest: a turn that is not plain text.
    """
    turns = []
    for index, turn in enumerate(chat.turns):
        if not isinstance(turn.content, str):
            place = f"messages[{index}].content"
            raise InvalidRequest(f"'{place}' must be text over gRPC", param=place)
        turns.append(pb.Message(role=turn.role, content=turn.content, name=turn.name))
    request = pb.ChatRequest(
        messages=turns,
        sampling=sampling,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )
    request.chat_template_kwargs.update(dict(chat.template_kwargs))
    return request


def to_answer(request_id: str, run: RunOutput) -> pb.Answer:
    """A run, or all of them merged, as a message."""
    answer = pb.Answer(
        request_id=request_id,
        text=run.text,
        token_ids=run.token_ids,
        accepted=run.accepted,
        logprobs=[_to_logprob(entry) for entry in run.logprobs or ()],
        finish_reason=pb.FINISH_REASON_UNSPECIFIED
        if run.finish_reason is None
        else _FINISH[run.finish_reason],
        usage=pb.Usage(
            num_prompt_tokens=run.num_prompt_tokens,
            num_cached_tokens=run.num_cached_tokens,
            num_output_tokens=run.num_output_tokens,
            speculation=_to_speculation(run.speculation),
        ),
    )
    if isinstance(run.stop_reason, str):
        answer.stop_string = run.stop_reason
    elif run.stop_reason is not None:
        answer.stop_token_id = run.stop_reason
    return answer


def to_run(answer: pb.Answer, *, with_logprobs: bool) -> RunOutput:
    """A message as the run that it was made of."""
    usage = answer.usage
    stop = answer.WhichOneof("stop_reason")
    return RunOutput(
        request_id=answer.request_id,
        token_ids=tuple(answer.token_ids),
        text=answer.text,
        accepted=tuple(answer.accepted),
        logprobs=tuple(_from_logprob(entry) for entry in answer.logprobs)
        if with_logprobs
        else None,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        finish_reason=_FINISHED.get(answer.finish_reason),
        stop_reason=None if stop is None else getattr(answer, stop),
        speculation=SpeculationStats(
            usage.speculation.num_steps,
            usage.speculation.num_drafts,
            usage.speculation.num_draft_tokens,
            usage.speculation.num_accepted_tokens,
            tuple(usage.speculation.num_accepted_tokens_per_pos),
        ),
    )


def _to_speculation(stats: SpeculationStats) -> pb.Speculation:
    return pb.Speculation(
        num_steps=stats.num_steps,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=stats.num_accepted_tokens_per_pos,
        acceptance_length=stats.acceptance_length,
    )


def _to_logprob(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=[pb.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in entry.top],
    )


def _from_logprob(entry: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((best.token_id, best.logprob) for best in entry.top)
    return TokenLogprob(entry.token_id, entry.logprob, top)
