"""Energy of an NVIDIA GPU, from its driver's counter (NVML, package ``nvidia-ml-py``).

The counter advances every few tens of milliseconds, so readings before and after a window of seconds give about 1 %
accuracy. It counts the whole board, idle power included.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch


def joules(run: Callable[[], Any], device: torch.device, seconds: float = 2.0) -> float | None:
    """Joules of one call, measured over about ``seconds`` of calls; None without NVML or its counter."""
    read = counter(device)
    if read is None:
        return None
    run()
    torch.cuda.synchronize(device)
    before, calls, deadline = read(), 0, time.perf_counter() + seconds
    while calls == 0 or time.perf_counter() < deadline:
        run()
        calls += 1
        if calls % 8 == 0:  # the host must not queue minutes of work before it looks at the clock
            torch.cuda.synchronize(device)
    torch.cuda.synchronize(device)
    return float(f"{(read() - before) / calls:.4g}")


def counter(device: torch.device) -> Callable[[], float] | None:
    """A function that reads the joules since the driver was loaded; None if there is no counter."""
    if device.type != "cuda":
        return None
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = _handle(pynvml, device)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:  # no driver, or a GPU without the counter
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # the counter's unit is a millijoule


def _handle(pynvml: Any, device: torch.device) -> Any:
    """NVML's handle of torch's device. NVML numbers all GPUs, torch only those in CUDA_VISIBLE_DEVICES."""
    index = torch.cuda.current_device() if device.index is None else device.index
    facts: Any = torch.cuda.get_device_properties(index)
    with contextlib.suppress(AttributeError, pynvml.NVMLError):
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{facts.uuid}")
    with contextlib.suppress(AttributeError, pynvml.NVMLError):
        address = f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return pynvml.nvmlDeviceGetHandleByPciBusId(address)
    return pynvml.nvmlDeviceGetHandleByIndex(index)
