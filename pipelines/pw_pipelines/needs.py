"""What the offline stages need, from shapes and a short measurement: memory, disk, reads, time.

Memory and disk are estimates of the peak. Times count matrix products and fits alone, at the speed
of this machine; reading and writing files come on top.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pw.blocks import MODULES
from pw_kernels.bitplane import plane_bytes
from pw_pipelines.activations import GPU_SHARE, MEMORY_BYTES
from pw_pipelines.codebook import fit_codebook
from pw_pipelines.costs import forward_operations, sensitivity_operations
from pw_pipelines.distill import WINDOWS_PER_STEP, distill_bytes
from pw_pipelines.observation import LOGITS_AT_ONCE, kept_bytes
from pw_pipelines.outputs import WINDOWS
from pw_pipelines.quantize import uniform_bytes
from pw_pipelines.rates import seconds_per_operation, timed
from pw_pipelines.refit import refit, refit_bytes
from pw_pipelines.sensitivity import ERRORS_BYTES
from pw_pipelines.subject import Subject

_WEIGHTS_TIMED = {"cpu": 1 << 17, "cuda": 1 << 24}  # in the short measurement
_PROCESS_BYTES = 600_000_000  # interpreter, torch and transformers
_OUTPUT_COPIES = 4  # of the second moments of gradients, while they are scaled


@dataclass(frozen=True)
class StageNeeds:
    """What one stage needs."""

    stage: str
    memory_bytes: int  # peak, on the host or the GPU
    scratch_bytes: int  # hidden states in a file beside the artifact while it runs
    read_bytes: int  # from the checkpoint, at most
    seconds: dict[str, float]  # by part


class Needs:
    """Needs of all stages that read the model.

    Args:
        subject: The model.
        text: Samples of calibration text, and tokens of each.
        widths: That are fitted.
        codebook: "joint" or "kmeans".
        device: Where the stages run.
    """

    def __init__(
        self,
        subject: Subject,
        text: tuple[int, int],
        widths: list[int],
        codebook: str,
        device: torch.device,
    ) -> None:
        self._subject, self._geometry = subject, subject.geometry
        self._widths, self._device = widths, device
        self._joint = codebook == "joint"
        samples, self._seqlen = text
        self._tokens = samples * self._seqlen
        self._gradient_tokens = min(samples, WINDOWS) * self._seqlen  # `tune`, there and back
        self._itemsize = subject.dtype.itemsize
        self._run_itemsize = 4 if device.type == "cpu" else self._itemsize
        self._per_operation = seconds_per_operation(device)

    def quantize(self) -> StageNeeds:
        """Digest, calibration during which experts are fitted, and the copy of the rest."""
        geometry, subject = self._geometry, self._subject
        largest = max(geometry.gate_up.weights, geometry.down.weights) * geometry.experts
        rows = max(geometry.gate_up.rows, geometry.down.rows) * geometry.experts
        tables = sum(2 << bits for bits in self._widths) * rows  # twice: padded on their way out
        fitting = largest * self._widths[-1] / 8 + 2 * tables + (1 << 29)
        if self._joint:
            squares = geometry.gate_up.cols**2 + geometry.down.cols**2
            fitting += 4 * geometry.experts * squares
            fitting += refit_bytes(largest, len(self._widths), self._device)
        # A layer's inputs and outputs, kept apart so that a stop between them is harmless; it is
        # fitted while it is in memory. The head is not loaded.
        seconds = {
            "calibration": self._operations_seconds(forward_operations(subject, self._tokens)),
            "fit": round(geometry.weights * self._seconds_per_weight(), 1),
        }
        return StageNeeds(
            "quantize",
            int(self._reading(2, head=False) + fitting),
            self._scratch(2),
            2 * geometry.weights * self._itemsize + 3 * subject.copied_bytes,
            seconds,
        )

    def tune(self) -> StageNeeds:
        """`quantize` again, behind some samples there and back: how gradients lie at the outputs
        of each layer's experts, which is kept while these are fitted.
        """
        again, rows = self.quantize(), self._geometry.down.rows
        outputs = 4 * len(self._geometry.layers) * rows**2
        back = self._reading(self._places, head=True, tokens=self._gradient_tokens)
        back += outputs + self._on_the_way_back()
        scaling = _PROCESS_BYTES + _OUTPUT_COPIES * outputs
        operations = 3 * forward_operations(self._subject, self._gradient_tokens)
        return StageNeeds(
            "tune",
            int(max(again.memory_bytes + outputs, back, scaling)),
            max(again.scratch_bytes, self._scratch(self._places, self._gradient_tokens)),
            again.read_bytes + 2 * self._subject.text_bytes,
            {"gradients": self._operations_seconds(operations)} | again.seconds,
        )

    def distillation(self, steps: int) -> StageNeeds:
        """All routed experts at once, as they are trained, beside a reading; the model read by
        layers once unquantized and there and back with what is trained, at every step.
        """
        subject, tokens = self._subject, WINDOWS_PER_STEP * self._seqlen
        reading = self._reading(self._places, head=True, tokens=tokens)
        trained = distill_bytes(self._geometry.weights)
        operations = 4 * steps * forward_operations(subject, tokens)
        whole = subject.text_bytes * 4 // self._itemsize  # in float32
        again = 0 if whole <= kept_bytes(self._device) else 3 * steps + 4
        return StageNeeds(
            "distillation",
            int(trained + reading + self._on_the_way_back()),
            self._scratch(self._places, tokens),
            (2 + again) * subject.text_bytes,
            {"steps": self._operations_seconds(operations)},
        )

    def sensitivity(self) -> StageNeeds:
        """Digest, all layers there and back; the states of all layers wait in between."""
        geometry, widths = self._geometry, len(self._widths)
        one = max(geometry.gate_up.weights, geometry.down.weights)
        energies = 4 * len(geometry.layers) * geometry.experts * widths
        energies *= geometry.gate_up.cols + geometry.down.cols
        back = max(ERRORS_BYTES, 4 * widths * one) + self._on_the_way_back()
        operations = sensitivity_operations(self._subject, self._tokens, widths)
        return StageNeeds(
            "sensitivity",
            int(self._reading(self._places, head=True) + energies + back),
            self._scratch(self._places),
            3 * self._subject.text_bytes,
            {"products": self._operations_seconds(operations)},
        )

    def trace(self) -> StageNeeds:
        """Digest and one reading."""
        operations = forward_operations(self._subject, self._tokens)
        return StageNeeds(
            "trace",
            int(self._reading(2, head=True)),
            self._scratch(2),
            2 * self._subject.text_bytes,
            {"products": self._operations_seconds(operations)},
        )

    def artifact_bytes(self) -> int:
        """Of the artifact without its tables, which are small."""
        luts = sum(uniform_bytes(self._geometry, b) - self._planes(b) for b in self._widths)
        return self._planes(self._widths[-1]) + luts + self._subject.copied_bytes

    def memory_there(self) -> int:
        """Of the GPU, or of the machine."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def _places(self) -> int:
        """Layers whose hidden states wait while all are read there and back."""
        return self._subject.layers - self._geometry.layers[0] + 2

    def _on_the_way_back(self) -> int:
        """Bytes beside a reading while gradients go back through a layer."""
        logits = 3 * 4 * LOGITS_AT_ONCE["cpu"]
        if self._itemsize == 4:
            return logits
        # float32 copies of a layer's experts wait for the way back
        return logits + 4 * self._geometry.weights // len(self._geometry.layers)

    def _states(self, places: int, tokens: int | None = None) -> int:
        """Bytes of the hidden states of a text, all of it if None, at so many layers."""
        tokens = self._tokens if tokens is None else tokens
        return places * tokens * self._subject.hidden * self._run_itemsize

    def _room(self) -> int:
        """For hidden states in memory."""
        if self._device.type == "cuda":
            return int(GPU_SHARE * self.memory_there())
        return MEMORY_BYTES

    def _scratch(self, places: int, tokens: int | None = None) -> int:
        """Bytes of hidden states that are too many for memory."""
        states = self._states(places, tokens)
        return states if states > self._room() else 0

    def _reading(self, places: int, *, head: bool, tokens: int | None = None) -> float:
        """Bytes in memory while one layer after the other reads a text, all of it if None."""
        subject, wide = self._subject, self._run_itemsize / self._itemsize
        in_layers = subject.copied_bytes_in_layers
        outer = subject.copied_bytes - in_layers - (0 if head else subject.head)
        experts = self._geometry.weights // len(self._geometry.layers) * self._itemsize
        kept = min(self._states(places, tokens), self._room())
        dense = (outer + in_layers // subject.layers) * wide
        return _PROCESS_BYTES + dense + experts + kept

    def _operations_seconds(self, operations: int) -> float:
        return round(operations * self._per_operation, 1)

    def _planes(self, bits: int) -> int:
        shapes = [self._geometry.shape(module) for module in MODULES]
        pair = sum(bits * plane_bytes(s.rows, s.cols) for s in shapes)
        return len(self._geometry.layers) * self._geometry.experts * pair

    def _seconds_per_weight(self) -> float:
        """Of the codebook fit, on random rows as long as the model's."""
        cols, device = self._geometry.gate_up.cols, self._device
        rows = torch.randn(max(1, _WEIGHTS_TIMED[device.type] // cols), cols, device=device)
        weights, hessian = torch.ones(1, cols, device=device), torch.eye(cols, device=device)

        def fit() -> None:
            book = fit_codebook(rows, weights, self._widths[0], self._widths[-1], torch.float16)
            if self._joint:
                refit(book, rows[None], hessian[None])

        return timed(fit) / rows.numel()
