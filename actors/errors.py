"""Errors of the engine.

EngineError
|-- RequestError            one request fails; carries `param` (the field) for the API's 400
|   |-- PromptTooLong       prompt does not fit max_model_len
|   |-- InvalidRequest      a field's value is outside what this server allows
|   `-- QueueFull           admission refused; carries `retry_after_s`
|-- EngineDead              the replica cannot continue; requests in flight fail with this
|   |-- RequestLost         it ended while it worked on this request
|   |-- WorkerLost          a worker process ended (socket closed)
|   `-- StepTimeout         a worker did not answer a step in time
`-- LoadError               weights, tokenizer or kernels cannot be loaded; names what and why
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class RequestError(EngineError):
    """A request that cannot be served. `param` names the request field at fault, if one is.

    `code` is a word for programs, the same on every surface; None: nothing beyond the class.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Crosses process borders inside Ray's task errors; keyword-only arguments need help.
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(cls: type[RequestError], state: dict[str, object]) -> RequestError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class InvalidRequest(RequestError):
    """A field's value is outside what this server allows."""


class PromptTooLong(RequestError):
    """Prompt of `prompt_len` tokens (or more: `is_least`) leaves no room for one output token."""

    def __init__(self, prompt_len: int, max_model_len: int, *, is_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' * is_least}{prompt_len} tokens, but this model's "
            f"context holds {max_model_len} tokens including at least one output token; shorten "
            f"the prompt to at most {max_model_len - 1} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
        self.prompt_len = prompt_len
        self.max_model_len = max_model_len


class QueueFull(RequestError):
    """Too many requests wait already."""

    def __init__(self, num_waiting: int, limit: int, retry_after_s: int) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting, the limit is {limit}; retry in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class EngineDead(EngineError):
    """The engine cannot continue; the message says what ended it."""


class RequestLost(EngineDead):
    """The engine ended while it worked on a request, which another replica can go on with."""


class WorkerLost(EngineDead):
    """A worker process ended: its socket closed."""


class StepTimeout(EngineDead):
    """A worker did not answer a step before its deadline."""


class LoadError(EngineError):
    """A model, tokenizer or kernel cannot be loaded."""


def first_line(error: BaseException) -> str:
    """Kind and first line of another library's error, for a message of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
