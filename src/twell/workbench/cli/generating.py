"""``twell generate``: text from prompts, and how fast it comes, densely and sparsely."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar, load_model

if TYPE_CHECKING:
    from twell.workbench.bench.timing import Spread
    from twell.workbench.generate import Comparison, Generated, Parting, Settings, Side

_HEADING = 60  # characters of a prompt above its text


@app.command("generate")
def generate_text(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Repeatable: all at once. Default, and for -: from standard input."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A file that holds a prompt; repeatable.", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message, by the model's chat template.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Text as it comes, several prompts one after the other. Default: one prompt on a terminal.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Densely and sparsely: do tokens agree, and how fast do they come?")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Default: 128, or what fits into the model's context.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy. Default: 0.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely tokens that make up this.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many most likely tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same command with the same seed: the same text.")] = None,
    static_cache: Annotated[
        bool,
        typer.Option("--static-cache", help="A cache of fixed size; on a GPU transformers then compiles the decoding."),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: as the model was saved.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of --compare.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object for each prompt, or of --compare one, on standard output.")
    ] = False,
) -> None:
    """Continue a prompt. FFNs with ReLU run sparsely, frozen; text goes to standard output, all else to standard error.

    Example: [bold]twell generate my-run/model --prompt "The ship" --max-new-tokens 64[/bold]

    Dense against sparse: [bold]twell generate my-run/model --prompt "The ship" --compare[/bold]
    """
    if stream and (compare or as_json):
        raise ValueError(f"--stream does not go with {'--compare' if compare else '--json'}")
    prompts = _read_prompts(prompt or [], prompt_file or [])
    try:
        from twell.workbench import generate as gen
    except ImportError as error:
        raise RuntimeError(f"models need more packages ({error}): pip install 'twell[train]'") from None
    gen.check_prompts(prompts)
    settings = gen.Settings(
        max_new_tokens=gen.DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        static_cache=static_cache,
    )
    if compare and settings.samples:
        raise ValueError("--compare is greedy: leave --temperature, --top-p and --top-k out")
    if repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {repeats}")

    language_model, tokenizer = load_model(model, device, dtype)
    ids = gen.encode(tokenizer, prompts, chat=chat)
    n_new = gen.new_tokens_that_fit(language_model, ids, max_new_tokens)
    if max_new_tokens is None and n_new < gen.DEFAULT_NEW_TOKENS:
        _say(f"at most {n_new} new tokens: the model's context holds {gen.context_of(language_model):,}")
    settings = dataclasses.replace(settings, max_new_tokens=n_new)
    facts = {
        "model": model,
        "dtype": str(language_model.dtype).removeprefix("torch."),
        "device": language_model.device.type,
        "static_cache": static_cache,
    }
    if compare:
        dense = gen.dense_twin(language_model)
        gen.frozen_summary(language_model)
        with counted_bar("generating") as progress:
            result = gen.compare(dense, language_model, ids, settings, repeats=repeats, progress=progress)
        _show_comparison(result, ids, tokenizer, facts, language_model.device, repeats, as_json)
        if line := gen.frozen_summary(language_model):
            _say(line)
        raise typer.Exit(0 if result.agrees else 1)
    sparse = gen.sparsify_(language_model).summary()
    gen.frozen_summary(language_model)
    if stream is None:
        stream = sys.stdout.isatty() and len(prompts) == 1 and not as_json
    if stream:
        done = _stream(language_model, tokenizer, prompts, ids, settings)
    else:
        done = gen.generate(language_model, tokenizer, ids, settings)
        _show(done, prompts, language_model, {**facts, "sparse": sparse}, as_json)
        _say(_times(done))
    _say(sparse)
    if line := gen.frozen_summary(language_model):  # as they are by now: on a GPU plans have come meanwhile
        _say(line)
    if any(generated.finish == "interrupted" for generated in done):
        _say("twell: interrupted")
        raise typer.Exit(130)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- prompts and models -------------------------------------------------------------------------------------


def _read_prompts(given: Sequence[str], files: Sequence[Path]) -> list[str]:
    """A prompt's last line break is the shell's or the editor's, not a part of it."""
    from twell.train.data import read_utf8

    prompts = [_standard_input() if text == "-" else text for text in given]
    prompts += [_standard_input() if str(path) == "-" else _without_break(read_utf8(path)) for path in files]
    return prompts or [_standard_input()]


def _standard_input() -> str:
    if sys.stdin.isatty():
        _say("prompt, ended by Ctrl-D on a line of its own:")
    return _without_break(sys.stdin.read())


def _without_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


# -- text ---------------------------------------------------------------------------------------------------


def _stream(
    model: Any, tokenizer: Any, prompts: Sequence[str], ids: Sequence[list[int]], settings: Settings
) -> list[Generated]:
    from twell.workbench import generate as gen

    done: list[Generated] = []
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        _print_heading(prompt, len(done), len(prompts))
        done += gen.generate(model, tokenizer, [prompt_ids], settings, on_text=_print_piece)
        print(flush=True)
        _say(_times(done[-1:]))
        if done[-1].finish == "interrupted":
            break
    return done


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _show(done: Sequence[Generated], prompts: Sequence[str], model: Any, facts: dict[str, Any], as_json: bool) -> None:
    from twell.workbench import generate as gen

    for number, (prompt, generated) in enumerate(zip(prompts, done, strict=False)):  # interrupted, there are fewer
        if not as_json:
            _print_heading(prompt, number, len(prompts))
            print(generated.text, flush=True)
            continue
        row = {
            "prompt": prompt,
            "text": generated.text,
            "token_ids": generated.ids,
            "finish": generated.finish,
            "prompt_tokens": len(generated.prompt_ids),
            "new_tokens": len(generated.ids),
            "first_token_s": _rounded(generated.first_token_s, 4),
            "tokens_per_s": _rounded(generated.tokens_per_s, 1),
            "active_neurons": gen.active_neurons(model, generated.prompt_ids + generated.ids),
            **facts,
        }
        print(json.dumps(row), flush=True)


def _print_heading(prompt: str, number: int, n_prompts: int) -> None:
    if n_prompts > 1:
        one_line = " ".join(prompt.split())
        shown = one_line if len(one_line) <= _HEADING else f"{one_line[: _HEADING - 3]}..."
        print(f"{'' if number == 0 else chr(10)}==> {shown} <==", flush=True)


def _times(done: Sequence[Generated]) -> str:
    """Of prompts that one call computed."""
    n_prompt, n_new = (sum(map(len, ids)) for ids in ([g.prompt_ids for g in done], [g.ids for g in done]))
    line = f"{n_prompt:,} prompt tokens, {n_new:,} new"
    first = [g.first_token_s for g in done if g.first_token_s is not None]
    if not first:
        return line
    seconds = max(g.seconds for g in done)
    later = n_new - len(done)
    rate = f", then {later / (seconds - first[0]):,.1f} tokens/s" if later and seconds > first[0] else ""
    return f"{line} in {seconds:.2f} s: the first after {first[0]:.3f} s{rate}"


def _rounded(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


# -- dense against sparse -----------------------------------------------------------------------------------


def _show_comparison(
    result: Comparison,
    ids: Sequence[list[int]],
    tokenizer: Any,
    facts: dict[str, Any],
    device: Any,
    repeats: int,
    as_json: bool,
) -> None:
    from twell.workbench.bench import timing

    sides = {"dense": result.dense, "sparse": result.sparse}
    if not as_json:
        _print_table(sides, facts, ids)
        for line in _agreement(result, tokenizer):
            print(line)
        return
    row = {
        "bench": "generate",
        **facts,
        "prompt_tokens": [len(p) for p in ids],
        "new_tokens": [len(row) for row in result.sparse.ids],
        "prefill_ms": {name: side.prefill_ms._asdict() for name, side in sides.items()},
        "decode_ms": {name: side.step_ms and side.step_ms._asdict() for name, side in sides.items()},
        "prefill_tokens_per_s": {name: side.prefill_tokens_per_s for name, side in sides.items()},
        "decode_tokens_per_s": {name: side.decode_tokens_per_s for name, side in sides.items()},
        "speedup": {what: _rounded(ratio, 3) for what, ratio in _speedups(result.dense, result.sparse).items()},
        "memory": {name: side.memory for name, side in sides.items()},
        "agrees": result.agrees,
        "logits_difference": float(f"{result.logits_difference:.3g}"),
        "largest_logit": float(f"{result.largest_logit:.4g}"),
        "partings": [
            {**parting._asdict(), "texts": _token_texts(parting, tokenizer), "verdict": parting.verdict}
            for parting in result.partings
        ],
        "repeats": repeats,
        **timing.environment(device),
    }
    print(json.dumps(row), flush=True)


def _speedups(dense: Side, sparse: Side) -> dict[str, float | None]:
    decode = None
    if dense.step_ms is not None and sparse.step_ms is not None:
        decode = dense.step_ms.p50 / sparse.step_ms.p50
    return {"prefill": dense.prefill_ms.p50 / sparse.prefill_ms.p50, "decode": decode}


def _print_table(sides: dict[str, Side], facts: dict[str, Any], ids: Sequence[list[int]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("", *sides, "sparse is"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    both = list(sides.values())
    speedups = {what: "" if ratio is None else f"{ratio:.2f}x" for what, ratio in _speedups(*both).items()}
    table.add_row("prefill, ms", *(_ms(side.prefill_ms) for side in both), speedups["prefill"])
    table.add_row("prefill, tokens/s", *(f"{side.prefill_tokens_per_s:,.0f}" for side in both), "")
    table.add_row("decode, ms a step", *(_ms(side.step_ms) for side in both), speedups["decode"])
    rates = [side.decode_tokens_per_s for side in both]
    table.add_row("decode, tokens/s", *("" if rate is None else f"{rate:,.1f}" for rate in rates), "")
    for what, label in (("weights", "weights"), ("frozen", "frozen beside them"), ("pass", "besides, peak")):
        table.add_row(f"{label}, MB", *(f"{side.memory[what] / 1e6:,.1f}" for side in both), "")
    console = Console()
    n_prompt, n_new = sum(map(len, ids)), max(len(row) for side in both for row in side.ids)
    prompts = f"{n_prompt:,} prompt tokens" if len(ids) == 1 else f"{len(ids)} prompts of {n_prompt:,} tokens together"
    cache = ", static cache" if facts["static_cache"] else ""
    print(f"{prompts}, up to {n_new:,} new; {facts['dtype']} on {facts['device']}{cache}")
    console.print(table)


def _ms(spread: Spread | None) -> str:
    """Median, and half the distance of the 20th and the 80th percentile."""
    if spread is None:
        return ""
    return f"{spread.p50:.3g} ±{(spread.p80 - spread.p20) / 2 / spread.p50:.0%}"


def _agreement(result: Comparison, tokenizer: Any) -> list[str]:
    n_new = sum(map(len, result.sparse.ids))
    logits = f"logits differ by up to {result.logits_difference:.2g}, the largest is {result.largest_logit:.3g}"
    if not result.partings:
        return [f"greedy tokens agree, all {n_new:,}; {logits}"]
    lines = []
    for parting in result.partings:
        which = "" if len(result.sparse.ids) == 1 else f"prompt {parting.prompt + 1}: "
        texts = _token_texts(parting, tokenizer)
        lines.append(
            f"{which}{parting.verdict}: greedy tokens part after {parting.position:,} equal ones, dense goes on with "
            f"{texts['dense']!r} ({parting.dense_token}), sparse with {texts['sparse']!r} ({parting.sparse_token}); "
            f"by {parting.dense_margin:.3g} and {parting.sparse_margin:.3g} of the logits, and rounding explains "
            f"{parting.bound:.2g}"
        )
    return [*lines, logits]


def _token_texts(parting: Parting, tokenizer: Any) -> dict[str, str]:
    return {"dense": tokenizer.decode([parting.dense_token]), "sparse": tokenizer.decode([parting.sparse_token])}
