"""``twell serve``."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from twell.workbench.cli.app import app
from twell.workbench.cli.common import device_of, dtype_of, load_model, run_name


@app.command()
def serve(
    model: Annotated[str, Argument(help="Folder or hub name of a causal language model.")],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0: all addresses of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any free port.")] = 8000,
    name: Annotated[
        str | None, Option(help="The model's name for clients. Default: that of its folder or run.")
    ] = None,
    engine: Annotated[
        str, Option(help="vllm, twell (the built-in server) or auto: vLLM if it is installed and there is a GPU.")
    ] = "auto",
    device: Annotated[str | None, Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16. Default: the model's own.")] = None,
    dense: Annotated[bool, Option("--dense", help="Run all layers densely, to compare.")] = False,
    batching: Annotated[bool, Option(help="Compute requests together, or one after the other.")] = True,
    cache_tokens: Annotated[int | None, Option(min=256, help="Size of the cache. Default: by the free memory.")] = None,
    api_key: Annotated[
        str | None, Option(envvar="TWELL_API_KEY", help="Ask clients for this key, as OpenAI does.", show_default=False)
    ] = None,
    open_: Annotated[bool, Option("--open", help="Let other machines in without a key.")] = False,
    allow_host: Annotated[list[str] | None, Option(help="A name to accept in the Host header; repeatable.")] = None,
    drain: Annotated[float, Option(min=0, max=86400, help="Seconds for answers under way after SIGTERM.")] = 30,
) -> None:
    """Serve a model to OpenAI's clients: /v1/completions, /v1/chat/completions, /v1/models.

    Only this machine can connect, unless --host says otherwise, which needs --api-key or --open. Where vLLM
    is installed and there is a GPU, vLLM serves the model. Example:
    [bold]twell serve my-run/model --port 8000[/bold]
    """
    from twell.hf.loading import model_path
    from twell.hf.text import context_of
    from twell.workbench.serve import batched, handover, running
    from twell.workbench.serve.engine import Engine
    from twell.workbench.serve.server import ModelServer

    if engine not in ("auto", "vllm", "twell"):
        raise ValueError(f"unknown engine {engine!r}: expected auto, vllm or twell")
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty: give one to --api-key or TWELL_API_KEY, or neither")
    sock = running.bind(host, port)
    is_open = api_key is None and not running.is_local(sock)
    if is_open and not open_:
        raise ValueError(f"other machines can reach {host}: give --api-key, or --open to ask nobody for a key")
    model = model_path(model)
    called, hosts = name or _name_of(model), (host, socket.gethostname(), *(allow_host or []))
    address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    warning = ["warning:  other machines can reach this address, and no key is asked for (--open)"] * is_open
    dtype = None if dtype is None else str(dtype_of(dtype)).removeprefix("torch.")
    own = {
        "--dense": dense,
        "--no-batching": not batching,
        "--cache-tokens": cache_tokens is not None,
        f"--device {device}": device_of(device) != device_of(None),
        f"--dtype {dtype}": dtype == "float64",
    }
    if _takes_vllm(engine, model, [option for option, is_given in own.items() if is_given]):
        command, environment = handover.vllm_command(model, called, sock, dtype, drain, hosts, api_key)
        print(f"address:  {address}/v1, the model is called {called}", *warning, sep="\n")
        handover.hand_over(sock, command, environment)
    language_model, tokenizer = load_model(model, device, dtype)
    print(f"model:    {model}, {str(language_model.dtype).removeprefix('torch.')}, on {language_model.device}")
    print(f"sparse:   {_make_sparse(language_model, dense)}", flush=True)
    tokens = cache_tokens or batched.cache_tokens_for(language_model)
    longest = context_of(language_model) or tokens
    if batching:
        runner, why_not = batched.choose_engine(language_model, tokens)
    else:
        runner, why_not = Engine(language_model), "--no-batching"
    with runner:
        if why_not:
            print(f"requests: one at a time ({why_not}), up to {longest:,} tokens each")
        else:
            longest = min(longest, tokens)
            print(f"requests: computed together, up to {longest:,} tokens each, {tokens:,} in all")
        server = ModelServer(language_model, tokenizer, called, runner, longest, api_key=api_key, hosts=hosts)
        sock.listen(1024)  # from here on clients can connect
        print(f"address:  {address}/v1", *warning, sep="\n")
        example = _example(address, called, tokenizer.chat_template is not None, api_key is not None)
        print(f"\n{example}\n\nCtrl-C ends it.", flush=True)
        if not running.run(server, sock, drain):
            print("twell: error: the model failed and could not start again; the lines above say why", file=sys.stderr)
            raise Exit(1)
    print("stopped")


def _takes_vllm(engine: str, model: str, own: list[str]) -> bool:
    """Decide whether vLLM serves the model, and print it. ``own``: given options that only the built-in server has."""
    from twell.vllm import installed_version
    from twell.workbench.serve import handover

    version = None if engine == "twell" else installed_version()
    if version is None:
        if engine == "vllm":
            raise RuntimeError("vLLM is not installed: pip install 'twell[vllm]'")
        return False
    why_not = handover.why_not_vllm(model, version, own, is_asked=engine == "vllm")
    if why_not is None:
        print(f"engine:   vLLM {version} (--engine twell for the built-in server)")
    elif engine == "vllm":
        raise ValueError(f"vLLM cannot serve it so: {why_not}")
    else:
        print(f"engine:   built in, not vLLM {version}: {why_not}")
    return why_not is None


def _make_sparse(model: Any, dense: bool) -> str:
    """Make the model sparse and freeze it, or make it dense. Returns a description of its layers."""
    from twell.hf.sparsify import desparsify_, sparsify_
    from twell.nn import freeze_, sparse_ffns

    if dense:
        return f"no layer of {len(desparsify_(model).rows)} (--dense)"
    summary, frozen = sparsify_(model).summary(), freeze_(model)
    if not frozen.layers:
        return summary
    waits = model.device.type == "cuda" and any(ffn.plan is None for _, ffn in sparse_ffns(model))
    return f"{summary}\nfrozen:   {frozen}{', more once they have planned' if waits else ''}"


def _name_of(model: str) -> str:
    """The name of a folder or of its run; a name on the hub as it is."""
    folder = Path(model)
    return run_name(folder.resolve()) if folder.exists() else model


def _example(address: str, name: str, can_chat: bool, asks_for_key: bool) -> str:
    path = "/v1/chat/completions" if can_chat else "/v1/completions"
    messages = [{"role": "user", "content": "Hello"}]
    asked: dict[str, Any] = {"messages": messages} if can_chat else {"prompt": "Once upon a time"}
    key = ' \\\n  -H "Authorization: Bearer $TWELL_API_KEY"' if asks_for_key else ""
    data = shlex.quote(json.dumps({"model": name, "max_tokens": 32, **asked}))
    return f"curl {address}{path} \\\n  -H 'Content-Type: application/json'{key} \\\n  -d {data}"
