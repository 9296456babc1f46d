"""What every rank of a replica has: its part of the model, its share of memory, its arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pw.config import EngineConfig
from pw.engine.parallel.seat import Seat
from pw.engine.precision.quality import settle_residual
from pw.engine.start.demand import budget_of
from pw.engine.start.sources import Loaded, load
from pw.engine.start.steps import settle_steps
from pw.errors import ConfigError
from pw.memory.arena import Arena
from pw.memory.budget import Demand, MemoryPlan
from pw.memory.host_store import HostPlaneStore
from pw.memory.kv_cache import KvCache
from pw.memory.mover import READERS
from pw.memory.pool import PagePool


@dataclass(frozen=True)
class Ground:
    """A loaded model without its experts, and the memory for all that comes."""

    config: EngineConfig  # with nothing left automatic that the artifact or the budget decides
    loaded: Loaded
    demand: Demand
    memory: MemoryPlan
    arena: Arena
    pool: PagePool
    kv: KvCache

    @property
    def on_gpu(self) -> bool:
        """Whether the arena is on a GPU."""
        return self.arena.pages.device.type == "cuda"

    @property
    def _moves(self) -> bool:
        """Whether blocks change their widths."""
        return self.config.policy.kind in ("adaptive", "replay")

    @property
    def widths(self) -> tuple[int, int]:
        """Least and most bits that a block can ever have."""
        if self.config.policy.kind == "replay":  # a trace may reach any width
            return self.demand.stored_bits
        return int(self.demand.least_bits.min()), int(self.demand.most_bits.max())

    def plane_store(self) -> HostPlaneStore:
        """Read the planes that can move into the host's memory."""
        return HostPlaneStore(
            self.loaded.source,
            self.memory.layouts,
            movable=self.widths if self._moves else (0, 0),
            limit_bytes=self.config.offload_cpu_memory,
            pin=self.on_gpu,
            alike=self.config.load_format == "dummy",
            readers=READERS if self.on_gpu else 0,
        )

    def mover_settings(self) -> dict[str, Any]:
        """How planes travel on this device: keywords of `Mover`."""
        return {
            "bytes_per_second": self.config.planner.transfer_budget_bytes if self.on_gpu else None,
            "readers": READERS if self.on_gpu else 0,
        }


def lay_ground(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    *,
    seat: Seat | None = None,
    agree: Callable[[int], int] = int,
    make_pool: Callable[[int], PagePool] = PagePool,
) -> Ground:
    """Load a model but for its experts, and divide the memory budget.

    Args:
        path: The artifact.
        config: The engine's.
        device: This rank's.
        seat: Its place among several ranks.
        agree: Turns this rank's budget into that of all.
        make_pool: Makes the pool of so many pages.
    """
    budget = budget_of(config, device)
    loaded = load(path, config, device, None if seat is None else seat.dense_part)
    if seat is not None:
        loaded = seat.shared(loaded)
    config = settle_residual(loaded.source, config)
    skeleton = loaded.skeleton
    config, demand, memory = settle_steps(loaded, config, agree(budget))
    arena = Arena(memory.num_pages, memory.page_bytes, device)
    pool = make_pool(memory.num_pages)
    kv = KvCache(
        skeleton.kv,
        demand.kv_dtype,
        arena,
        pool,
        config.max_num_seqs,
        memory.max_model_len,
        loaded.source.geometry.blocks,
        chunk_tokens=min(demand.chunk_tokens, config.max_num_seqs * memory.max_model_len),
        prefix_rule=config.prefix_cache_precision if config.enable_prefix_caching else None,
    )
    return Ground(config, loaded, demand, memory, arena, pool, kv)


def device_of(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of a rank.

    Raises:
        ConfigError: It is not to be had.
    """
    size, name = config.tensor_parallel_size, config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device is to be had: `--device cuda`", "use `--device cpu`")
    if size == 1:
        device = torch.device(name)
        use_device(device)
        return device
    found = torch.cuda.device_count()
    if name != "cuda" or found < size:
        raise ConfigError(
            f"{size} ranks need {size} CUDA devices, numbered from 0: {found} are to be had, "
            f"`--device {name}`",
            "use a smaller --tensor-parallel-size, or choose devices with CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", rank)
    use_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make a GPU this thread's: kernels that Triton compiles run where the thread is."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
