"""Show which parts of vLLM work on this machine, and why others do not; 20 s, without an engine.

python tools/vllm_gpu/probe.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import prelude

PACKAGES = (
    "torch", "triton", "transformers", "pydantic", "pydantic_core", "typing_extensions", "numpy", "huggingface_hub",
    "tokenizers", "safetensors", "fastapi", "openai", "msgspec", "pyzmq", "psutil", "setuptools", "accelerate",
    "torchvision", "flashinfer-python", "einops", "requests", "pillow", "vllm", "twell",
)  # fmt: skip
MODULES = (
    "vllm",
    "vllm.platforms.cuda",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.sample.sampler",
    "vllm.compilation.backends",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.transformers",
    "twell.vllm.model",
)


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} -")
    return "; ".join(found)


def platform() -> Any:
    from vllm.platforms import current_platform

    assert current_platform.is_cuda(), current_platform
    return type(current_platform).__name__, current_platform.get_device_capability(), current_platform.get_device_name()


def plugin() -> None:
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert "LlamaSparseReluForCausalLM" in ModelRegistry.get_supported_archs()


def norms() -> None:
    import torch

    def norm(x: Any, weight: Any) -> Any:
        x = x.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight

    for D in (128, 2048):
        x, residual = torch.randn(2, 7, D, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(D, device="cuda", dtype=torch.bfloat16)
        y, summed, added = torch.empty_like(x), x.clone(), residual.clone()
        torch.ops._C.rms_norm(y, x, weight, 1e-6)
        torch.testing.assert_close(y, norm(x, weight), atol=0.02, rtol=0.02)
        torch.ops._C.fused_add_rms_norm(summed, added, weight, 1e-6)
        torch.testing.assert_close(added, x + residual)
        torch.testing.assert_close(summed, norm(x + residual, weight), atol=0.02, rtol=0.02)


def pinned_memory() -> None:
    import torch
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    for dtype in (torch.int32, torch.int64, torch.bool, torch.float32):
        cpu = torch.zeros(3, 5, dtype=dtype, pin_memory=True)
        view = get_accelerator_view_from_cpu_tensor(cpu)
        cpu[1, 2] = 1
        torch.cuda.synchronize()
        assert view.clone().cpu().tolist() == cpu.tolist()
        view[2, 4] = 1
        torch.cuda.synchronize()
        assert cpu[2, 4] == 1


def weak_references() -> None:
    import torch
    from vllm.utils.torch_utils import weak_ref_tensor

    x = torch.randn(6, 4, device="cuda", dtype=torch.bfloat16)[1:]
    y = weak_ref_tensor(x)
    assert y.data_ptr() == x.data_ptr() and torch.equal(x, y) and y.stride() == x.stride()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = weak_ref_tensor(x * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(z, x * 2)


def works(name: str, step: Callable[[], Any]) -> bool:
    start = time.perf_counter()
    try:
        said = step()
    except BaseException:
        print(f"FAIL {name}\n{traceback.format_exc()[-3000:]}", flush=True)
        return False
    seconds = time.perf_counter() - start
    print(f"ok   {name} ({seconds:.1f} s)", said if isinstance(said, tuple) else "", flush=True)
    return True


def main() -> None:
    prelude.setup()
    print(sys.version, prelude.BUNDLE, versions(), sep="\n", flush=True)
    steps: list[tuple[str, Callable[[], Any]]] = [(f"import {m}", partial(importlib.import_module, m)) for m in MODULES]
    steps += [("platform", platform), ("plugin", plugin), ("patch", prelude.patch)]
    steps += [("norms", norms), ("pinned memory", pinned_memory), ("weak references", weak_references)]
    failed = [name for name, step in steps if not works(name, step)]
    print("FAILED:" if failed else "ALL WORK", *failed, flush=True)
    os._exit(bool(failed))  # threads of a half-imported engine could block a normal exit


if __name__ == "__main__":
    main()
