"""Errors that a user can cause or cure: one line with cause, value and remedy, then a hint.

Every other exception is a bug of ours and keeps its traceback. Exit codes are those of the command
line (see `EXIT_CODES` in README): 1 failure, 2 usage, 3 artifact invalid, 4 out of memory plan,
5 partial result left, resumable.
"""


class PwError(Exception):
    """Base of all errors meant for users.

    Args:
        message: One line: what went wrong, with the value and what was expected. No full stop.
        hint: The command or flag that helps, or "" when there is none.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(PwError):
    """A setting or an argument that cannot be honoured."""

    exit_code = 2


class StoreError(PwError):
    """An artifact that is missing, damaged, foreign or newer than this code."""

    exit_code = 3


class StaleStageError(StoreError):
    """A stage exists with other settings or other inputs than those asked for."""


class BudgetError(PwError):
    """Weights, KV cache and workspace cannot fit in the memory budget."""

    exit_code = 4


class PartialResultError(PwError):
    """A stage stopped half way and left a folder from which it can resume."""

    exit_code = 5


class ModelError(PwError):
    """A checkpoint that is damaged, incomplete or not supported."""


class DamagedModelError(ModelError):
    """Weights that mean nothing: what has been made of others of that checkpoint is of no use."""


class RequestError(PwError):
    """A request that is refused; the engine lives on.

    Args:
        code: OpenAI-style error code, e.g. `context_length_exceeded`.
        param: Name of the offending request field, or None.
        status: HTTP status.
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint)
        self.code = code
        self.param = param
        self.status = status


class EngineLostError(RuntimeError):
    """A step's last word: the engine is beyond help, nothing that it computes can be relied on."""
