"""What things cost on a GPU, in units of one element of a large GEMM: one token, one neuron, one projection.

``twell tune`` measures a GPU. Without that, an H200's costs are scaled to it, or layers run densely."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from twell.plan import tuned


class Costs(NamedTuple):
    """Costs of a GPU, in elements of a large dense FFN: 5.8 ps on an H200 at D 2048, bf16."""

    gate: float  # an element of the cold gate
    down: float  # an element of the hot down projection
    gather: float  # the two gathered rows of one active (token, neuron) pair
    heavy: float  # an element of a GEMM over listed rows
    token: float  # fixed cost of a token
    hot: float  # further fixed cost of a token if any neuron is hot
    batch: float  # fixed cost of a batch, at D 2048
    dense: float = 1.0  # an element of a dense projection; in training with its backward
    few: float = 1.0  # factor on the cost of few tokens, in rows of weights read


# Fitted to an H200's times of 8 layers of a trained model and of synthetic workloads, 1024 to 131072 tokens.
_COSTS: dict[int, Costs] = {
    90: Costs(gate=0.93, down=0.71, gather=147.0, heavy=1.5, token=650.0, hot=440.0, batch=1.2e7)
}


class Fp8Costs(Costs):
    """Costs with FP8 weights, in elements of a dense FP8 FFN, 3.5 ps. Few tokens have a table of their own in
    choose.py; no kernel runs tiles of tokens."""


# From an H200's times of the split's kernels, 16384 tokens of skew29.
_FP8_COSTS: dict[int, Costs] = {
    90: Fp8Costs(gate=0.83, down=1.17, gather=210.0, heavy=2.5, token=1200.0, hot=730.0, batch=1e7)
}
# Fitted to an H200's forward and backward with L1, 16384 tokens of skew29, skew100, iid29 and a trained model's layers;
# dense: compiled.
_TRAINING_COSTS: dict[int, Costs] = {
    90: Costs(gate=0.93, down=0.25, gather=690.0, heavy=4.9, token=4600.0, hot=1000.0, batch=3.6e7, dense=2.95)
}
_UNKNOWN = Costs(gate=1e9, down=1e9, gather=1e9, heavy=1e9, token=1e9, hot=1e9, batch=1e9, few=1e9)  # all runs densely
_PROCESSORS, _BANDWIDTH = 132, 4.8  # SMs and TB/s of the H200 that was measured
_LEAST_BANDWIDTH = 2.0  # TB/s, of GPUs with compute capability 9.0: assumed if torch does not report a GPU's


class Scale(NamedTuple):
    """The facts that a GPU's costs depend on, relative to the H200 that was measured."""

    capability: int  # 10 * major + minor
    processors: float = 1.0
    bandwidth: float = 1.0

    @property
    def is_measured(self) -> bool:
        return self.processors == self.bandwidth == 1.0


def scale_of(device: torch.device) -> Scale:
    """The scale of a device. A CPU counts as the H200, so plans made there are those of that GPU."""
    if device.type != "cuda":
        return Scale(90)
    facts: Any = torch.cuda.get_device_properties(device)
    if "H200" in facts.name and facts.multi_processor_count == _PROCESSORS:
        return Scale(10 * facts.major + facts.minor)
    clock, bits = (getattr(facts, "memory_clock_rate", 0), getattr(facts, "memory_bus_width", 0))  # kHz; twice a clock
    bandwidth = 2e3 * clock * bits / 8 / 1e12 or _LEAST_BANDWIDTH
    relative = facts.multi_processor_count / _PROCESSORS, bandwidth / _BANDWIDTH
    return Scale(10 * facts.major + facts.minor, *relative)


def costs_for(device: torch.device, *, training: bool = False, fp8: bool = False) -> Costs:
    """The costs that ``twell tune`` has measured on the device; else those of an H200, scaled to the device; for an
    unknown compute capability costs so high that all runs densely. ``fp8``: costs with FP8 weights, which ``twell
    tune`` does not measure.

    The scaling is a guess from what bounds each cost: GEMMs by the number of SMs, gathers and the fixed cost of tokens
    by the bandwidth, and the fixed cost of a batch takes the same time on every GPU.
    """
    own, _ = _tuned(device)
    if own is not None and not fp8:
        return Costs(**own["training" if training else "inference"])
    of = scale_of(device)
    table = _TRAINING_COSTS if training else _FP8_COSTS if fp8 else _COSTS
    known = table.get(of.capability, _UNKNOWN)
    if of.is_measured or known is _UNKNOWN:
        return known
    bytes_bound = of.processors / of.bandwidth  # the unit of all costs is an element of a GEMM
    return known._replace(
        gather=known.gather * bytes_bound,
        token=known.token * bytes_bound,
        hot=known.hot * bytes_bound,
        batch=known.batch * of.processors,
        few=known.few * max(1.0, of.bandwidth),  # the launch takes the same time, in which more rows are read
    )


def _tuned(device: torch.device) -> tuple[dict[str, dict[str, float]] | None, str]:
    return tuned.read(tuned.path_for(device), Costs._fields) if device.type == "cuda" else (None, "")


def costs_are(device: torch.device) -> str:
    """The source of a device's costs, in words."""
    of, (own, why) = scale_of(device), _tuned(device)
    if own is not None:
        return why
    if of.capability not in _COSTS:
        return f"none, so layers run densely: no GPU with sm_{of.capability} was measured, and {why}; it takes a minute"
    if of.is_measured:
        return f"measured costs of sm_{of.capability}"
    return (
        f"an H200's costs, scaled to {of.processors:.0%} of its multiprocessors and {of.bandwidth:.0%} of its bandwidth"
        f": a guess, and {why}; it takes a minute"
    )
