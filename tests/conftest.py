"""Shared test set-up: poisoned buffers, no GPU surprises, no AMX surprises."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Some virtual machines advertise AMX and trap on its use; must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
import typer
from hypothesis import HealthCheck, settings

# Both must be set before kernels are imported.
os.environ["TWELL_CHECK_LAUNCHES"] = "1"  # every kernel's arguments are what it was compiled for
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch.utils._device import _device_constructors

import interpreted
from command_line import Result, Twell
from twell import cpu
from twell.plan import tuned
from twell.workbench import cli

if os.environ.get("PYTEST_XDIST_WORKER"):  # two processes on two cores
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of commands and examples: two busy threads wait for each other, 50 s for 2

# Cached before torch.empty is patched below: else a model under ``torch.device("meta")`` would take real memory.
_device_constructors()

collect_ignore = ["cross_compile.py"]  # a script of its own, for a process without the interpreter

settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords contain folder names, too
                item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def short_garbage_collections() -> None:
    """Skip what is imported: accelerate collects garbage before every training (0.3 to 1 s each), as servers do."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, or a number that is no index, so that reading it before writing shows."""

    def poison(make):
        def poisoned(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.device.type not in ("cpu", "cuda"):
                return t
            if t.dtype == torch.uint8:
                return t.fill_(255)  # NaN in any float dtype
            if t.dtype in (torch.int32, torch.int64):
                return t.fill_(0x3FFFFFF1)
            return t.detach().fill_(float("nan")).requires_grad_(t.requires_grad) if t.is_floating_point() else t

        return poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture(autouse=True)
def small_shapes_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are small; the CPU path would leave all of them to the dense reference."""
    monkeypatch.setattr(cpu.block, "MIN_WORK", 0)


@pytest.fixture(autouse=True)
def interpreter_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() and "twell.gpu.prefill.split" in sys.modules:
        interpreted.speed_up_triton()
        interpreted.gather_in_torch(monkeypatch.setattr)


@pytest.fixture
def without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU: there is no backend triton."""
    with contextlib.suppress(ImportError):
        import twell.gpu  # noqa: F401  # its modules read the variable when they are first imported
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(autouse=True)
def no_measured_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of whoever runs the tests."""
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@functools.cache
def commands() -> Any:
    """The command line, put together once: that takes longer than most refusals."""
    return typer.main.get_command(cli.app)


@pytest.fixture
def twell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Twell:
    """Runs the command line in this process."""
    monkeypatch.setattr(cli, "app", commands())

    def run(*args: str, columns: int = 140) -> Result:
        monkeypatch.setattr(sys, "argv", ["twell", *args])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Result(int(stop.value.code or 0), *capsys.readouterr())

    return run


# ---------------------------------------------------------------------------------------------------------
# Servers of a tiny model, for tests of ``twell serve``: one for each engine, shared by all tests of a process.
# Imported inside the fixtures, since serving.py needs the packages of a server.
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from serving import make_model

    return make_model(tmp_path_factory.mktemp("my-run") / "model")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Any]:
    from serving import served

    with served(folder, batched=True) as one:
        yield one


@pytest.fixture(scope="session")
def sequential(folder: Path) -> Iterator[Any]:
    from serving import served

    with served(folder, batched=False) as one:
        yield one


@pytest.fixture(params=["server", "sequential"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)
