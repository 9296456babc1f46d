"""What a model and its settings ask of the memory budget."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.config import EngineConfig
from pw.engine.parallel import peers
from pw.engine.precision.statistics import statistics_bytes
from pw.engine.start.sources import WeightSource, dtype_of
from pw.errors import ConfigError
from pw.memory import arena, mirror
from pw.memory.budget import Demand, sampled_rows, workspace_bytes
from pw.memory.mover import CHUNK_BYTES
from pw.models.skeleton import Skeleton
from pw.planning.bits_file import read_bits
from pw_kernels.dispatch import attention_counters_bytes, attention_scratch_bytes


def budget_of(config: EngineConfig, device: torch.device) -> int:
    """Bytes for weights, KV and workspace together; free memory before anything is loaded."""
    if config.memory_budget is not None:
        return config.memory_budget
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    return int(free * config.gpu_memory_utilization)


def decodes_in_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are to be captured, and memory is to be set aside for them."""
    return device.type == "cuda" and not config.enforce_eager


def demand_of(
    source: WeightSource,
    skeleton: Skeleton,
    config: EngineConfig,
    dense: list[tuple[Tensor, Tensor]] | None,
) -> Demand:
    """Bytes that model and settings ask for.

    Raises:
        ConfigError: Widths or a context that the model does not have.
    """
    low, high = _bounds(source, config)
    kv_dtype = dtype_of(config.kv_cache_dtype, skeleton.dtype)
    stated = config.max_model_len or skeleton.max_model_len
    if stated > skeleton.max_model_len:
        raise ConfigError(
            f"max_model_len is {stated} but the model states {skeleton.max_model_len} tokens"
        )
    of_step = partial(
        workspace_bytes,
        source.geometry,
        skeleton.kv,
        sequences=config.max_num_seqs,
        vocabulary=skeleton.vocab_size,
        widest=_widest(skeleton.model),
        itemsize=skeleton.dtype.itemsize,
        sampled=sampled_rows(skeleton.device),
    )
    chunk = config.step_tokens(skeleton.device.type)
    workspace = 0
    if decodes_in_graphs(config, skeleton.device):  # they keep what their steps take
        workspace += of_step(tokens=config.max_num_seqs) + mirror.STAGING_BYTES
    if config.policy.kind in ("adaptive", "replay"):
        each = statistics_bytes(config.planner.residual, source.geometry)
        workspace += each * min(config.max_num_seqs, chunk)
    if skeleton.device.type == "cuda":
        # Between the host and the arena, by the mover and at a safe point, and the page table.
        workspace += CHUNK_BYTES + arena.STAGING_BYTES + mirror.STAGING_BYTES
        workspace += attention_counters_bytes(skeleton.device)  # the KV cache keeps them
        workspace += peers.own_bytes(config.tensor_parallel_size)

    def scratch(context: int) -> int:
        tokens = min(chunk, config.max_num_seqs * context)
        return of_step(tokens=tokens) + _attention_scratch(
            skeleton, kv_dtype, config, tokens, context
        )

    return Demand(
        geometry=source.geometry,
        kv=skeleton.kv,
        kv_dtype=kv_dtype,
        dense=skeleton.dense_bytes,
        experts_dense=sum(t.numel() * t.element_size() for pair in dense or () for t in pair),
        workspace=workspace,
        context_scratch=scratch,
        least_bits=low,
        most_bits=high,
        stored_bits=(source.min_bits, source.max_bits),
        max_model_len=stated,
        max_num_seqs=config.max_num_seqs,
        chunk_tokens=chunk,
        page_bytes=config.page_bytes,
        table_bytes=source.table_bytes,
    )


def _attention_scratch(
    skeleton: Skeleton, dtype: torch.dtype, config: EngineConfig, most: int, context: int
) -> int:
    """Bytes of scratch that attention of steps of up to `most` tokens over a context takes in the
    layer that takes most.
    """
    shapes = {(layer.kv_heads, layer.k_dim, layer.v_dim) for layer in skeleton.kv.layers}
    steps = [most]
    if decodes_in_graphs(config, skeleton.device):
        steps.append(config.max_num_seqs)
    return sum(
        max(
            attention_scratch_bytes(
                skeleton.device,
                dtype,
                heads=int(skeleton.model.config.num_attention_heads) // config.tensor_parallel_size,
                kv_heads=kv_heads,
                key_size=key_size,
                value_size=value_size,
                tokens=tokens,
                context=context,
            )
            for kv_heads, key_size, value_size in shapes
        )
        for tokens in steps
    )


def _widest(model: torch.nn.Module) -> int:
    """Most outputs of the linear maps of one module, the output head left out."""
    return max(
        sum(
            child.weight.shape[0]
            for name, child in module.named_children()
            if isinstance(child, torch.nn.Linear) and name != "lm_head"
        )
        for module in model.modules()
    )


def _bounds(
    source: WeightSource, config: EngineConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Least and most bits [n] of each block that the policy can reach.

    Raises:
        ConfigError: The artifact does not have them.
    """
    stored, policy = (source.min_bits, source.max_bits), config.policy
    if policy.kind == "static" and policy.path is not None:
        bits = read_bits(policy.path, source.geometry, *stored)
        return bits, bits
    low, high = config.min_bits or stored[0], config.max_bits or stored[1]
    if policy.bits is not None:
        low = high = policy.bits
    if not stored[0] <= low <= high <= stored[1]:
        raise ConfigError(
            f"bits {low} to {high} are asked for, the artifact has {stored[0]} to {stored[1]}"
        )
    every = np.ones(source.geometry.blocks, dtype=np.int64)
    return low * every, high * every
