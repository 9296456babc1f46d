"""One model's routed experts as `experts.py` measures them: layer, batches, widths, checks."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grouped
import moe
import peers
import prompts
import torch
from torch import Tensor

from pw_kernels import cuda_prompts, reference
from pw_kernels.bitplane import MAX_BITS

Batch = tuple[Tensor, Tensor, Tensor]
Calls = Sequence[Callable[[], Any]]
CHECKED = 256  # tokens of a batch, at most, that are compared


@dataclass(frozen=True)
class Width:
    """Bits of each module's experts, and the least and greatest that the policy allows."""

    name: str
    bits: moe.Widths
    span: tuple[int, int]


class Shape:
    """One model's layer, its batches, and each block decoded once for all checks."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.name, self.model = name, moe.MODELS[name]
        torch.manual_seed(0)
        self.layer = moe.Layer(self.model)
        bits = range(moe.MIN_BITS, MAX_BITS + 1)
        self.widths = [Width(f"{b}", moe.alike(self.model, lambda _, b=b: b), (b, b)) for b in bits]
        mixes = {f"planned {b}": moe.planned(self.model, b) for b in (3, 4)}
        mixes["2..8"] = moe.alike(self.model, moe.MIXES["2..8"])
        self.widths += [Width(k, mix, (moe.MIN_BITS, MAX_BITS)) for k, mix in mixes.items()]
        self.batches: dict[int, list[Batch]] = {}
        for count in tokens:
            torch.manual_seed(count)
            self.batches[count] = self.layer.batches(count)
        self._decoded: dict[tuple[str, int], list[Tensor]] = {}

    def is_prompt(self, tokens: int) -> bool:
        """Whether the product takes its form for prompts."""
        slots = tokens * self.model.top_k
        return cuda_prompts.wins(slots, self.model.experts, torch.device("cuda", 0))

    def take(self, width: Width, tokens: int) -> None:
        """Set all blocks to their widths."""
        self.layer.set_bits(width.bits)
        self.allow(width, tokens)

    def allow(self, width: Width, tokens: int) -> None:
        """Say which widths are possible: those of the policy; all of them for prompts."""
        span = (moe.MIN_BITS, MAX_BITS) if self.is_prompt(tokens) else width.span
        for blocks in self.layer.blocks.values():
            blocks.pages = replace(blocks.pages, widths=span)

    def apart(self, batch: Batch) -> Tensor:
        """The layer as it is chosen, but no launch begins before the last has ended."""
        tokens = len(batch[0])
        if self.is_prompt(tokens):
            return prompts.run(self.layer, batch, "chosen", overlap=False)
        widths = self.layer.blocks["gate_up"].pages.widths
        return self.layer.run(batch, moe.kept_apart(self.model, tokens, widths))

    def touched(self, tokens: int) -> list[set[int]]:
        """Experts that each batch goes to."""
        return [set(ids.flatten().tolist()) for _, ids, _ in self.batches[tokens]]

    def active(self, tokens: int) -> float:
        """How many, on average."""
        return statistics.mean(map(len, self.touched(tokens)))

    def peer_size(self, tokens: int) -> tuple[int, int, int]:
        """Rows of x, rows and columns of the matrix of a peer."""
        active = self.active(tokens)
        m = max(1, round(tokens * self.model.top_k / active))
        return m, *peers.dense_size(self.model, active)

    def decoded(self, module: str, bits: int) -> list[Tensor]:
        """Blocks [N, K] bf16 of a module at one width; sets the widths that it reads."""
        if (module, bits) not in self._decoded:
            blocks = self.layer.blocks[module]
            blocks.set_bits([bits] * self.model.experts)
            self._decoded[module, bits] = [
                reference.decode_block(self.layer.arena, blocks.pages, e, torch.bfloat16).bfloat16()
                for e in range(self.model.experts)
            ]
        return self._decoded[module, bits]

    def error(self, tokens: int, width: Width) -> float:
        """Relative error of the first tokens of a batch; infinite if two runs differ."""
        modules = {
            name: [self.decoded(name, bits)[e] for e, bits in enumerate(width.bits[name])]
            for name in self.model.shapes
        }
        self.take(width, tokens)
        batch = self.batches[tokens][0]
        first, second = (self.layer.run(batch) for _ in range(2))
        if not torch.equal(first, second):
            return float("inf")
        x, ids, weights = (each[:CHECKED] for each in batch)
        want = torch.zeros(x.shape, device=x.device)
        for e in ids.unique().tolist():
            rows, places = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[rows].float() @ modules["gate_up"][e].float().t()).chunk(2, 1)
            part = (torch.nn.functional.silu(gate) * up) @ modules["down"][e].float().t()
            want.index_add_(0, rows, part * weights[rows, places, None])
        return ((first[:CHECKED].float() - want).norm() / want.norm()).item()

    def bf16_calls(self, tokens: int) -> dict[str, dict[str, list[Calls]]]:
        """Calls of each tile of the Triton grouped matmul and of torch's, by module."""
        found: dict[str, dict[str, list[Calls]]] = {"triton": {}, "torch": {}}
        for name, (_, cols) in self.model.shapes.items():
            first = name == "gate_up"
            inputs = []
            for x, ids, _ in self.batches[tokens]:
                rows = x if first else torch.randn(ids.numel(), cols, device=x.device).to(x)
                inputs.append((rows, self.layer.dense[name], ids, self.model.top_k if first else 1))
            tiles = [list(grouped.triton_calls(*each)) for each in inputs]
            found["triton"][name] = list(zip(*tiles, strict=True))
            found["torch"][name] = [[grouped.torch_call(*each) for each in inputs]]
        return found
