"""Shared experts beside the routed ones, on a stream of their own.

The routed experts of some tokens leave much of memory idle, and what is launched on two streams is
captured as two branches of a CUDA graph. The flat pass (`pw.models.flat_parts`) asks for it by
itself; in any other module tree, a block that calls its shared experts after the routed ones, on
what it was given itself, has them launched first. Which blocks do is seen in a probe, and what they
get is kept only if the model gives the same logits as before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pw.models.experts import expert_modules
from pw.models.probing import Forward, probe_logits, why_not

FEWEST, MOST = 9, 64  # tokens
FEW = 8  # at most: products take norms along, and so does the router; see `pw.models.flat_parts`
_URGENT = -1  # priority of a stream; the default one's is 0, the lowest
_NAMES = ("shared_experts", "shared_expert")
_log = logging.getLogger(__name__)


class Beside(Protocol):
    """A place where things run beside what is launched meanwhile.

    Attributes:
        open: It may be used now.
    """

    open: bool

    def apart(self) -> AbstractContextManager[None]:
        """What is launched inside begins when all before it has ended, and runs beside the rest."""
        ...

    def meet(self) -> None:
        """What is launched from here on begins when all of it has ended."""
        ...


class SideStream:
    """Another stream of a device, beside whichever is the current one.

    A stream has memory of its own, workspaces of libraries too. So it is open for steps of fixed
    shape only, whose first runs take all that they need before the budget is shared out.

    Args:
        device: A GPU.
        urgent: What is launched there goes first where there is not room for all. Launches behind
            `apart`, on both streams, and behind `meet` begin, in a captured step, while those
            before them end: they have to wait themselves (`pw_kernels.branches`).
    """

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self._thread, self._device = threading.local(), device
        self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            device, priority=_URGENT if urgent else 0
        )
        self._overlap_next = _overlaps() if urgent else None

    @property
    def open(self) -> bool:
        """Whether this thread may use it now: another one's engine may be capturing."""
        return getattr(self._thread, "open", False)

    @open.setter
    def open(self, value: bool) -> None:
        self._thread.open = value

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `Beside.apart`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        if self._overlap_next is not None:
            self._overlap_next(self._stream, current)
        with torch.cuda.stream(self._stream):
            yield

    def meet(self) -> None:
        """See `Beside.meet`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        if self._overlap_next is not None:
            self._overlap_next(current, current)


def _overlaps() -> Callable[[torch.cuda.Stream, torch.cuda.Stream], None] | None:
    """`pw_kernels.branches.overlap_next`, where what is launched behind it waits itself."""
    try:
        import_module("pw_kernels.triton_overlap")  # else sums are torch's, which do not
        module = import_module("pw_kernels.branches")
    except ImportError:
        return None
    return module.overlap_next  # type: ignore[no-any-return]


def side_stream(device: torch.device, *, urgent: bool = False) -> SideStream | None:
    """One for all layers, as libraries keep a workspace for each stream; None on a CPU."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _side_stream(index, urgent)  # `cuda` and `cuda:0` are one device


@cache
def _side_stream(index: int, urgent: bool) -> SideStream:
    return SideStream(torch.device("cuda", index), urgent=urgent)


@contextmanager
def opened(device: torch.device) -> Iterator[None]:
    """What is launched inside may use the device's other streams."""
    sides = [side_stream(device, urgent=urgent) for urgent in (False, True)]
    for side in filter(None, sides):
        side.open = True
    try:
        yield
    finally:
        for side in filter(None, sides):
            side.open = False


def pays(tokens: int) -> bool:
    """Whether a batch of so many tokens gains by it."""
    return FEWEST <= tokens <= MOST


class _Fork:
    """A block whose shared experts are launched before all else in it.

    Args:
        block: Calls `shared` once, on what it was given.
        shared: Its shared experts.
        beside: Where they run.

    Attributes:
        tried: They run there whatever the number of tokens is.
    """

    def __init__(self, block: Any, shared: Any, beside: Beside) -> None:
        self._block, self._shared, self._beside = block.forward, shared.forward, beside
        self._modules = (block, shared)
        self._result: Tensor | None = None
        self.tried = True
        block.__dict__["forward"], shared.__dict__["forward"] = self._forked, self._taken

    def undo(self) -> None:
        """Let both run as before."""
        for module, forward in zip(self._modules, (self._block, self._shared), strict=True):
            module.__dict__["forward"] = forward

    def _forked(self, hidden: Tensor) -> Tensor:
        self._result = None  # of a call that broke before it was taken
        if self.tried or (self._beside.open and pays(hidden.numel() // hidden.shape[-1])):
            with self._beside.apart():
                self._result = self._shared(hidden)
        result: Tensor = self._block(hidden)
        return result

    def _taken(self, hidden: Tensor) -> Tensor:
        result, self._result = self._result, None
        if result is None:
            own: Tensor = self._shared(hidden)
            return own
        self._beside.meet()
        return result


def fork_shared_experts(model: Any, forward: Forward, beside: Beside) -> int:
    """Run shared experts beside the routed ones where that can be; how many blocks.

    Args:
        model: transformers' model with dense weights, whole or a rank's part, and attention bound.
        forward: Its forward pass through transformers' own code.
        beside: Where they run.
    """
    before, pairs = _watch(model, forward)
    forks = [_Fork(block, shared, beside) for block, shared in pairs]
    if not forks:
        return 0
    if (cause := why_not(model, before, forward)) is not None:
        for fork in forks:
            fork.undo()
        _log.warning(
            "shared experts of `%s` wait for the routed: %s", model.config.model_type, cause
        )
        return 0
    for fork in forks:
        fork.tried = False
    return len(forks)


def _watch(model: Any, forward: Forward) -> tuple[Tensor, list[tuple[nn.Module, nn.Module]]]:
    """Logits of a probe, and the blocks that call shared experts last and on their own input."""
    pairs: dict[str, tuple[Any, Any, Any]] = {}
    for name, experts in expert_modules(model):
        block = model.get_submodule(name.rpartition(".")[0])
        if (shared := _shared_experts(block)) is not None:
            pairs[name] = (block, experts, shared)
    calls: list[tuple[nn.Module, Any]] = []
    watched = [module for pair in pairs.values() for module in pair]
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs)))
        for module in watched
    ]
    try:
        (logits,) = probe_logits(model, forward)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for pair in pairs.values():
        own = [(module, inputs) for module, inputs in calls if module in pair]
        modules, inputs = [module for module, _ in own], [inputs for _, inputs in own]
        if modules == list(pair) and len(inputs[2]) == 1 and inputs[2][0] is inputs[0][0]:
            found.append((pair[0], pair[2]))
    return logits, found


def _shared_experts(block: nn.Module) -> nn.Module | None:
    """Those of a block. Where ranks have parts of them, sums over ranks stay on one stream."""
    shared = next((getattr(block, name) for name in _NAMES if hasattr(block, name)), None)
    if shared is None or any("pw_reduce" in module.__dict__ for module in shared.modules()):
        return None
    return shared  # type: ignore[no-any-return]
