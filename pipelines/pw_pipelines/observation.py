"""A model that reads windows of text under observation, one decoder layer after the other.

Every layer takes all batches before the next is loaded, so memory holds one layer whatever their
number; hidden states wait in `Activations`. Gradients go the same way backward: each layer is
computed again from its stored input. What is measured is the observers' business
(`pw.models.dense.ExpertObserver`).

Axes: P windows, B windows of a batch, S tokens of a window, H hidden, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pw.blocks import BlockKey, ExpertGeometry, Module
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertObserver
from pw.models.layered import LayeredModel, SharedKv
from pw_pipelines.activations import Activations, needs_file
from pw_pipelines.gpu_memory import free_bytes
from pw_pipelines.precision import tensor_cores
from pw_pipelines.progress import Advance
from pw_pipelines.ranks import Ranks
from pw_pipelines.savepoint import Savepoint
from pw_pipelines.steps import Steps, trim

Weights = Callable[[BlockKey], Tensor | None]  # -> [N, K], any float dtype; None = the model's own
Loss = Callable[[int, Tensor, Tensor], Tensor]  # batch, tokens [B, S], last output -> its gradient
AfterLayer = Callable[[int], None]  # told that observers have seen all of a layer, by its number

CPU = torch.device("cpu")

# A GPU wants few and large products: starting them takes longer than computing small ones.
_TOKENS_PER_BATCH = {"cpu": 1 << 11, "cuda": 1 << 15}
LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}
_CACHE_BYTES = 1 << 28  # a model of this size is read from disk once
_CACHE_SHARE = 0.3  # of a GPU's free memory, for the same


class ObservedModel:
    """A checkpoint that can be run.

    Args:
        checkpoint: An opened checkpoint with experts.
        device: Where to run.
        scratch: Folder for hidden states that do not fit in memory; None = the system's.
        cache_bytes: Layers beyond the one in use are kept up to this; None = a small model's.
        dtype: Of dense weights and hidden states; None = float32 on a CPU, else the checkpoint's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: str = "cpu",
        *,
        scratch: Path | None = None,
        cache_bytes: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        gc.collect()  # an earlier stage's model: its layers and what they call hold each other
        trim()
        self.device = torch.device(device)
        self.geometry = checkpoint.geometry
        own = torch.float32 if self.device.type == "cpu" else checkpoint.weight_dtype
        self._dtype = dtype or own
        room = kept_bytes(self.device) if cache_bytes is None else cache_bytes
        self._model = LayeredModel(checkpoint, self._dtype, self.device, room)
        self._original = self._model.experts.weight
        self._scratch = scratch

    @property
    def layers(self) -> int:
        """Number of decoder layers, dense ones included."""
        return self._model.layers

    def expert_weight(self, key: BlockKey) -> Tensor:
        """Weight [N, K] of a block of the layer that was read last, in the checkpoint's dtype."""
        return self._original(self.geometry.slot(key.layer), key.expert, key.module, self.device)

    @torch.no_grad()
    @tensor_cores()
    def read(
        self,
        windows: Tensor,
        observers: Sequence[ExpertObserver] = (),
        weights: Weights | None = None,
        advance: Advance = lambda _: None,
        savepoint: Savepoint | None = None,
        after_layer: AfterLayer = lambda _: None,
    ) -> Activations:
        """Read windows [P, S]; gives the last layer's output of every batch, as place 0.

        Args:
            windows: Tokens.
            observers: One for each of `batches(windows, self.device)`, or none.
            weights: Other expert weights than the model's.
            advance: Called with the number of windows each time a layer has read some.
            savepoint: Where a reading whose states need a file is saved after every layer.
            after_layer: Called with each layer, before it is saved.
        """
        parts = list(batches(windows, self.device))
        states, shared, steps = self._begin(parts, 2, savepoint, observers)
        for layer in range(self.layers):
            source, target = (self.layers - layer) % 2, (self.layers - layer - 1) % 2
            if steps.skip():
                advance(windows.shape[0])
                continue
            for batch, ids in enumerate(parts):
                inputs = states.get(source, batch) if layer else self._embed(ids)
                with self._watched(observers[batch] if observers else None, weights):
                    output = self._layer(layer, ids, inputs, shared[batch])
                states.put(target, batch, output)
                advance(ids.shape[0])
            after_layer(layer)
            steps.finish()
        return states

    @tensor_cores()
    def backward(
        self,
        windows: Tensor,
        observer: ExpertObserver,
        advance: Advance = lambda _: None,
        savepoint: Savepoint | None = None,
        after_layer: AfterLayer = lambda _: None,
        weights: Weights | None = None,
        loss: Loss | None = None,
    ) -> None:
        """Read windows [P, S] and back-propagate the sum of all tokens' losses, or another `loss`.

        `advance` is called with the number of windows each time a layer has read some, and again
        on the way back; `backward_units` says how often in all. `savepoint` and `after_layer` are
        as in `read`; layers are told on the way back.
        """
        parts = list(batches(windows, self.device))
        first, last = self.geometry.layers[0], self.layers - 1
        above = self.layers - first  # first of two places for what only the next layer needs
        states, shared, steps = self._begin(parts, above + 2, savepoint, [observer])

        def input_of(layer: int) -> int:
            return layer - first if layer >= first else above + layer % 2

        for layer in range(self.layers):
            if steps.skip():
                advance(windows.shape[0] * (layer > 0))
                continue
            for batch, ids in enumerate(parts):  # the inputs of `layer`, by the one below
                if layer == 0:
                    output = self._embed(ids)
                else:
                    inputs = states.get(input_of(layer - 1), batch)
                    with torch.no_grad(), self._watched(None, weights):
                        output = self._layer(layer - 1, ids, inputs, shared[batch])
                    advance(ids.shape[0])
                states.put(input_of(layer), batch, output)
            steps.finish()
        gradients: list[SharedKv] = [{} for _ in parts]
        for layer in range(last, first - 1, -1):
            if steps.skip():
                advance(windows.shape[0])
                continue
            for batch, ids in enumerate(parts):
                hidden = states.get(input_of(layer), batch).to(self.device).detach()
                hidden.requires_grad_(layer > first)
                upstream = None
                if layer < last:
                    upstream = partial(_given, states.get(above + (layer + 1) % 2, batch))
                with self._watched(observer, weights), torch.enable_grad():
                    at_end = self._loss_gradient if loss is None else partial(loss, batch)
                    self._backward(
                        layer, ids, hidden, upstream or at_end, shared[batch], gradients[batch]
                    )
                if hidden.grad is not None:
                    states.put(above + layer % 2, batch, hidden.grad)
                advance(ids.shape[0])
            after_layer(layer)
            steps.finish()

    def backward_units(self, windows: int) -> int:
        """What `backward` advances by in all."""
        return windows * (2 * self.layers - 1 - self.geometry.layers[0])

    @torch.no_grad()
    @tensor_cores()
    def branches(
        self, ids: Tensor, changes: Mapping[BlockKey, Callable[[], Tensor]], advance: Advance
    ) -> tuple[Tensor, dict[BlockKey, Tensor]]:
        """Last layer's output [B, S, H] for windows [B, S]: as is, and with each change alone.

        Args:
            ids: One batch.
            changes: Block -> its other weight [N, K].
            advance: Called once per layer.
        """
        states, shared = self._model.embed(ids.to(self.device)), SharedKv()
        branches: dict[BlockKey, tuple[Tensor, SharedKv]] = {}
        for layer in range(self.layers):
            for key, (state, kv) in branches.items():
                branches[key] = self._layer(layer, ids, state, kv), kv
            for key in (key for key in changes if key.layer == layer):
                weight, kv = changes[key](), dict(shared)
                with self._watched(None, {key: weight}.get):
                    branches[key] = self._layer(layer, ids, states, kv), kv
            states = self._layer(layer, ids, states, shared)
            trim()
            advance(1)
        return states, {key: state for key, (state, _) in branches.items()}

    @torch.no_grad()
    def logits(self, ids: Tensor, states: Tensor) -> Iterator[Tensor]:
        """Logits [B, n, V] of one batch from the last layer's output, n positions at a time."""
        ids, states = ids.to(self.device), states.to(self.device)
        for keep in self._positions(ids, ids.shape[1]):
            yield self._model.head(ids, states, keep)

    def _begin(
        self,
        parts: list[Tensor],
        places: int,
        savepoint: Savepoint | None,
        observers: Sequence[ExpertObserver],
    ) -> tuple[Activations, list[SharedKv], Steps]:
        """Room for hidden states, for what layers of each batch share, and what is done already."""
        hidden, dtype = self._model.hidden_size, self._dtype
        # What layers share is in memory alone; what fits in memory is quick.
        needed = not self._model.shares_kv and needs_file(places, parts, hidden, dtype, self.device)
        if savepoint is not None and not savepoint.useful(needed):
            savepoint = None
        steps = Steps(savepoint, observers)
        keep = None if savepoint is None else savepoint.states
        states = Activations(places, parts, hidden, dtype, self.device, self._scratch, keep)
        return states, [{} for _ in parts], steps

    def _embed(self, ids: Tensor) -> Tensor:
        return self._model.embed(ids.to(self.device))

    def _layer(self, layer: int, ids: Tensor, hidden: Tensor, shared: SharedKv) -> Tensor:
        return self._model.layer(layer, ids.to(self.device), hidden.to(self.device), shared)

    def _backward(
        self,
        layer: int,
        ids: Tensor,
        hidden: Tensor,
        above: Callable[[Tensor, Tensor], Tensor],
        shared: SharedKv,
        gradients: SharedKv,
    ) -> None:
        """Compute a layer again and send back the gradient of its output.

        Args:
            layer: Which layer.
            ids: Tokens of the batch [B, S].
            hidden: Its input [B, S, H].
            above: Gives the gradient of its output [B, S, H] from tokens and output.
            shared: Keys and values that layers of the batch share, all known by now.
            gradients: Of those; readers add to them, the layer that made them uses them up.
        """
        given = {k: tuple(t.detach().requires_grad_() for t in v) for k, v in shared.items()}
        now = dict(given)
        output = self._layer(layer, ids, hidden, now)
        tensors = [output]
        upstream = [above(ids, output).to(self.device)]
        for kind in [kind for kind in now if now[kind] is not given.get(kind)]:
            made = zip(now[kind], gradients.pop(kind, ()), strict=False)
            pairs = [(tensor, gradient) for tensor, gradient in made if tensor.requires_grad]
            tensors += [tensor for tensor, _ in pairs]
            upstream += [gradient for _, gradient in pairs]
        torch.autograd.backward(tensors, upstream)
        for kind, leaves in given.items():
            if all(leaf.grad is not None for leaf in leaves):
                found = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
                sums = zip(gradients.get(kind, found), found, strict=True)
                gradients[kind] = tuple(a + b for a, b in sums) if kind in gradients else found

    def _loss_gradient(self, ids: Tensor, output: Tensor) -> Tensor:
        """Gradient [B, S, H] of the sum of all tokens' losses at the last layer's output."""
        ids, hidden = ids.to(self.device), output.detach().requires_grad_()
        for keep in self._positions(ids, ids.shape[1] - 1):
            logits = self._model.head(ids, hidden, keep).flatten(0, 1).float()
            loss = cross_entropy(logits, ids[:, keep + 1].flatten(), reduction="sum")
            torch.autograd.backward(loss)
        assert hidden.grad is not None
        return hidden.grad

    def divergence(
        self, ids: Tensor, output: Tensor, reference: Tensor, *, gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """How far next-token distributions are from those of another last output.

        Args:
            ids: One batch of windows [B, S].
            output: The last layer's output [B, S, H].
            reference: That of the model that is right.
            gradient: Whether that is wanted.

        Returns:
            Sum of KL(reference, output) over all tokens, nats; its gradient at `output`.
        """
        ids, reference = ids.to(self.device), reference.to(self.device)
        hidden = output.detach().to(self.device).requires_grad_(gradient)
        total = torch.zeros((), device=self.device)
        for keep in self._positions(ids, ids.shape[1]):
            with torch.no_grad():
                expected = self._model.head(ids, reference, keep).float().log_softmax(-1)
            with torch.set_grad_enabled(gradient):
                found = self._model.head(ids, hidden, keep).float().log_softmax(-1)
                loss = (expected.exp() * (expected - found)).sum()
            if gradient:
                torch.autograd.backward(loss)
            total += loss.detach()
        return total, hidden.grad

    def _positions(self, ids: Tensor, count: int) -> Iterator[Tensor]:
        """The first `count` positions, so many at a time that their logits are no burden."""
        size = max(1, LOGITS_AT_ONCE[self.device.type] // (ids.shape[0] * self._model.vocabulary))
        yield from torch.split(torch.arange(count, device=self.device), size)

    @contextmanager
    def _watched(self, observer: ExpertObserver | None, weights: Weights | None) -> Iterator[None]:
        """Experts under observation, and with other weights if given."""
        layers, experts = self.geometry.layers, self._model.experts

        def changed(slot: int, expert: int, module: Module, device: torch.device) -> Tensor:
            assert weights is not None
            weight = weights(BlockKey(layers[slot], expert, module))
            if weight is None:
                return self._original(slot, expert, module, device)
            return weight.to(device)

        experts.observer = observer
        if weights is not None:
            experts.weight = changed
        try:
            yield
        finally:
            experts.observer, experts.weight = None, self._original


def _given(gradient: Tensor, _ids: Tensor, _output: Tensor) -> Tensor:
    """A gradient that is known, whatever the output."""
    return gradient


def kept_bytes(device: torch.device) -> int:
    """For layers that are kept: reading them again takes as long as computing on a GPU."""
    if device.type != "cuda":
        return _CACHE_BYTES
    return int(_CACHE_SHARE * free_bytes(device))


def batches(windows: Tensor, device: torch.device = CPU) -> Iterator[Tensor]:
    """Windows [P, S] in the batches in which a model on this device reads them."""
    if windows.shape[0]:
        size = _TOKENS_PER_BATCH[device.type] // windows.shape[1]
        yield from torch.split(windows, max(1, size))


def adding_up(sums: ExpertObserver, geometry: ExpertGeometry, ranks: Ranks) -> AfterLayer:
    """What makes the sums of a layer, first axis of all tensors of `sums`, those of all ranks."""

    def add_up(layer: int) -> None:
        if layer in geometry.layers:
            slot = geometry.slot(layer)
            ranks.add_up(tensor[slot] for tensor in sums.state().values())

    return add_up


def part_of(windows: Tensor, ranks: Ranks, device: torch.device = CPU) -> Tensor:
    """The windows that a rank reads: whole batches, so that each is computed as by one process."""
    mine = ranks.part(list(batches(windows, device)))
    return torch.cat(list(mine)) if mine else windows[:0]
