"""Makes vLLM importable from the bundle: call ``setup()`` before vLLM is imported, ``patch()`` after.

The bundle's folder is ``scratch/bundle``, or $VGPU_BUNDLE. What is installed goes before what it holds; packages that
must come from it nevertheless are named in $VGPU_FRONT (pydantic,pydantic_core).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUNDLE = Path(os.environ.get("VGPU_BUNDLE", ROOT / "scratch" / "bundle"))

# vLLM imports these, but this trial does not use them.
ABSENT = {
    "anthropic", "av", "cv2", "llguidance", "lmformatenforcer", "mcp", "mistral_common",
    "model_hosting_container_standards", "numba", "openai_harmony", "outlines_core", "soundfile", "uvloop", "xgrammar",
}  # fmt: skip
# Warm-ups of other models' kernels, which import more packages.
WARMUPS = (
    "_warmup_gemm_rs_ar", "_warmup_ll_bf16_router_gemm", "b12x_warmup", "cutedsl_warmup", "deep_gemm_warmup",
    "deepseek_v4_sparse_mla_attention_warmup", "flashinfer_sparse_mla_decode_autotune_warmup", "kimi_k3_triton_warmup",
    "mamba_triton_warmup", "qwen4_exp_qsa_triton_warmup", "qwen_triton_warmup", "qwen_vl_triton_warmup",
    "watermark_sample_warmup",
)  # fmt: skip
# One process, so the stand-ins are everywhere; no network, no usage statistics.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)]),
}


class _Anything(type):
    """Metaclass of classes that do nothing, but can be subclassed, called, and used as decorators and type hints."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):  # as a decorator
            return args[0]
        if cls.__dict__.get("_is_absent"):
            return _decorator
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any

    def __iter__(cls) -> Any:
        return iter(())


def _decorator(f: Any = None, *args: Any, **kwargs: Any) -> Any:
    return f


def _pydantic_schema(cls: Any, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _anything(name: str) -> Any:
    return _Anything(name, (), {"_is_absent": True, "__get_pydantic_core_schema__": classmethod(_pydantic_schema)})


class _AbsentModule(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _anything(name)
        setattr(self, name, value)
        return value


def _only_asks() -> bool:
    """Whether the caller only asks for the module by importlib.util.find_spec, and does not import it."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "find_spec" and code.co_filename.endswith("importlib/util.py"):
            return True
        frame = frame.f_back
    return False


class _LastFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: called if no other has the module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in ABSENT or _only_asks():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _AbsentModule(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def _to_front(names: list[str]) -> None:
    """Put these packages of the bundle before installed ones."""
    folder = Path(tempfile.mkdtemp(prefix="vgpu-front"))
    for name in names:
        for path in BUNDLE.glob(f"{name}*"):
            if path.stem == name or path.name.startswith(f"{name}-"):
                (folder / path.name).symlink_to(path)
    sys.path.insert(0, str(folder))


def setup() -> None:
    if not (BUNDLE / "vllm").is_dir():
        raise SystemExit(f"no bundle in {BUNDLE}: see tools/vllm_gpu/README.md")
    sys.path.insert(0, str(ROOT / "src"))
    sys.path.append(str(BUNDLE))
    front = [name for name in os.environ.get("VGPU_FRONT", "").split(",") if name]
    if front:
        _to_front(front)
    sys.meta_path.append(_LastFinder())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def patch() -> None:
    """Make vLLM inspect model classes in this process, and skip the warm-ups of other models' kernels."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.warmup import kernel_warmup

    registry._run_in_subprocess = lambda f: f()
    for name in WARMUPS:
        if hasattr(kernel_warmup, name):
            setattr(kernel_warmup, name, lambda *args, **kwargs: None)
