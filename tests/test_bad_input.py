"""Bad input to commands, by the hundred: each is refused in one clear line, by no traceback, and none is accepted."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from command_line import Result, Twell
from twell.train.tokenizer import train_bpe
from twell.workbench import doctor
from twell.workbench.bench.checks import WrongResult
from twell.workbench.cli import analyze, common, errors

SENTENCE = "hello world this is a text "


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound model, a text, and measured rows."""
    place = tmp_path_factory.mktemp("bad")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, hidden_act="relu", bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(place / "model")
    train_bpe([SENTENCE * 20], 300).save_pretrained(place / "model")
    (place / "text.txt").write_text(SENTENCE * 40)
    (place / "rows.jsonl").write_text(json.dumps(MODEL_ROW) + "\n" + json.dumps(FFN_ROW) + "\n")
    (place / "empty").mkdir()
    for suffix in (".jsonl", ".parquet", ".u16", ".txt"):  # .u16: text, too, but a file of tokens by its name
        (place / f"odd{suffix}").write_bytes(b"\xff" if suffix == ".txt" else b"ab")
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda *_: None)
    monkeypatch.setattr(doctor, "bf16_problem", lambda: None)


def assert_refused(result: Result) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and "unexpected error" not in result.stderr
    if "Usage:" not in result.stderr:  # of the parser of options
        assert result.stderr.startswith("twell: error: ") and len(result.stderr.splitlines()) == 1, result.stderr
        assert len(result.stderr) > len("twell: error: \n")


# -- files of models --------------------------------------------------------------------------------------

Damage = Callable[[Path], Any]


def setting(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def holding(name: str, content: bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content)


def cut(name: str, length: int) -> Damage:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:length])


def without(*names: str) -> Damage:
    return lambda model: [(model / name).unlink() for name in names]


def with_tensor(value: torch.Tensor | None) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        del tensors["model.layers.0.mlp.up_proj.weight"]
        more = {} if value is None else {"model.layers.0.mlp.up_proj.weight": value}
        save_file(tensors | more, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def sharded_without_a_map(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text("{}")


WEIGHTS: dict[str, Damage] = {
    "weights empty": holding("model.safetensors", b""),
    "weights cut in the header": cut("model.safetensors", 500),
    "weights cut in a tensor": cut("model.safetensors", 5000),
    "weights garbage": holding("model.safetensors", b"x" * 1000),
    "weights header too long": holding("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
    "weights of nothing": holding("model.safetensors", struct.pack("<Q", 2) + b"{}"),
    "weights gone": without("model.safetensors"),
    "a tensor missing": with_tensor(None),
    "a tensor of another shape": with_tensor(torch.zeros(3, 3)),
    "no map of shards": sharded_without_a_map,
    "more layers than weights": setting(num_hidden_layers=2),
    "wider than weights": setting(hidden_size=32),
    "fewer tokens than weights": setting(vocab_size=10),
    "another architecture": setting(model_type="bert"),
    "generation_config cut": cut("generation_config.json", 20),
    "generation_config a list": holding("generation_config.json", b"[]"),
    "generation_config of words": holding("generation_config.json", b'{"temperature": "warm", "do_sample": true}'),
    "generation_config eos": holding("generation_config.json", b'{"eos_token_id": "x"}'),
    "generation_config eos list": holding("generation_config.json", b'{"eos_token_id": [0, "x"]}'),
    "generation_config length": holding("generation_config.json", b'{"max_new_tokens": -5}'),
}
TOKENIZERS: dict[str, Damage] = {
    "tokenizer {}": holding("tokenizer.json", b"{}"),
    "tokenizer []": holding("tokenizer.json", b"[]"),
    "tokenizer empty": holding("tokenizer.json", b""),
    "tokenizer cut": cut("tokenizer.json", 300),
    "tokenizer gone": without("tokenizer.json", "tokenizer_config.json"),
    "tokenizer.json gone": without("tokenizer.json"),
    "tokenizer_config cut": cut("tokenizer_config.json", 30),
    "tokenizer_config []": holding("tokenizer_config.json", b"[]"),
    "tokenizer_config {}": holding("tokenizer_config.json", b"{}"),
    "tokenizer_config eos": holding(
        "tokenizer_config.json", b'{"tokenizer_class": "TokenizersBackend", "eos_token": 5}'
    ),
    "tokenizer of its own code": holding(
        "tokenizer_config.json", b'{"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tok.T", null]}}'
    ),
}
CONFIGS: dict[str, Damage] = {
    "config gone": without("config.json"),
    "config empty": holding("config.json", b""),
    "config {}": holding("config.json", b"{}"),
    "config []": holding("config.json", b"[]"),
    "config null": holding("config.json", b"null"),
    "config cut": cut("config.json", 100),
    "config no text": holding("config.json", b"\xff\xfe"),
    "config a folder": lambda model: ((model / "config.json").unlink(), (model / "config.json").mkdir()),
    "code of its own": setting(
        model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    ),
    "counts garbage": holding("neuron_counts.npz", b"xx"),
    **{
        f"{name} {value!r}": setting(**{name: value})
        for name, values in {
            "hidden_size": ("16", 0, -16, 16.5, None),
            "intermediate_size": ("x", 0),
            "num_attention_heads": (0, 3),
            "num_key_value_heads": (0,),
            "num_hidden_layers": ("one", 0, -1),
            "vocab_size": (0, -1),
            "max_position_embeddings": (0, "x"),
            "head_dim": (7, "x"),
            "hidden_act": ("nonsense", None),
            "dtype": ("float7",),
            "model_type": ("nonsense", None, 5, "t5"),
            "rms_norm_eps": ("x",),
            "rope_parameters": ({"rope_type": "nonsense"}, [1]),
            "quantization_config": ([1],),
            "pad_token_id": (10**6,),
        }.items()
        for value in values
    },
}
_ONE_STEP = ("steps=1", "context=32", "sequences_per_step=1")
ON_MODEL: dict[str, list[str]] = {
    "analyze": ["analyze", "MODEL", "--text", "TEXT", "--tokens", "64"],
    "generate": ["generate", "MODEL", "-p", "hello", "--max-new-tokens", "2"],
    "bench": ["bench", "model", "MODEL", "--shape", "1x8", "--seconds", "0", "--device", "cpu"],
    "eval": ["eval", "MODEL", "--text", "TEXT"],
    "calibrate": ["calibrate", "MODEL", "--text", "TEXT", "--tokens", "64"],
    "check": ["convert", "MODEL", "--check"],
    "train": ["train", "--from", "MODEL", "--data", "TEXT", "--validation", "TEXT", "--out", "OUT/run", *_ONE_STEP],
    "doctor": ["doctor", "MODEL"],
    "quantize": ["quantize", "MODEL", "--out", "OUT/quantized"],
}


def pairs() -> list[tuple[str, str]]:
    """Every damage with two of the commands that read the file, so that every command meets every kind of damage."""
    readers = {
        **dict.fromkeys(WEIGHTS, ("analyze", "generate", "bench", "eval", "calibrate", "check")),
        **dict.fromkeys(TOKENIZERS, ("analyze", "generate", "bench", "eval", "calibrate", "train")),
        **dict.fromkeys(CONFIGS, ("doctor", "analyze", "check", "generate", "doctor", "train", "eval", "bench")),
        "counts garbage": ("doctor", "analyze", "generate"),
    }
    return [
        (damage, command)
        for i, (damage, commands) in enumerate(readers.items())
        for command in {commands[2 * i % len(commands)], commands[(2 * i + 1) % len(commands)]}
    ]


@pytest.mark.parametrize(("damage", "command"), sorted(pairs()))
def test_damaged_models_are_refused(twell: Twell, place: Path, tmp_path: Path, damage: str, command: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(place / "model", model)
    {**WEIGHTS, **TOKENIZERS, **CONFIGS}[damage](model)
    result = twell(*filled(ON_MODEL[command], place, model, tmp_path))
    assert_refused(result)
    if "of its own" in damage:
        assert "code of models is never run" in result.stderr
    assert not (tmp_path / "trace.npz").exists() and not (tmp_path / "run").exists()


def filled(command: list[str], place: Path, model: Path, out: Path) -> list[str]:
    files = {"MODEL": model, "TEXT": place / "text.txt", "ROWS": place / "rows.jsonl", "BAD": place / "odd", "OUT": out}
    for name, path in files.items():
        command = [part.replace(name, str(path)) for part in command]
    return command


@pytest.mark.parametrize("command", ON_MODEL)
def test_the_sound_model_is_taken(twell: Twell, place: Path, tmp_path: Path, command: str) -> None:
    """Or the tests above would show nothing."""
    model = tmp_path / "model"  # calibrate writes into it
    shutil.copytree(place / "model", model)
    result = twell(*filled(ON_MODEL[command], place, model, tmp_path))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["analyze", "eval", "generate", "check", "doctor", "calibrate", "quantize"])
@pytest.mark.parametrize(
    "name", ["/nonexistent", "nonexistent", "./x/y", "../x", "~/x", "a/b/c", "x/", "", "no such/name"]
)
def test_names_that_are_neither_folders_nor_hub_names_are_refused(
    twell: Twell, place: Path, tmp_path: Path, command: str, name: str
) -> None:
    result = twell(*filled([part.replace("MODEL", name) for part in ON_MODEL[command]], place, place, tmp_path))
    assert_refused(result)
    assert command != "quantize" or "is no folder of a model" in result.stderr


# -- options ----------------------------------------------------------------------------------------------

FFN = "-w skew2 -m 2 --width 16 --hidden 32 --seconds 0"
OPTIONS = {  # of each command, by line or semicolon; after -> what the error says
    f"bench ffn {FFN}": """
        --seconds -1; --seconds nan; --seconds inf; --seconds x; --dtype float8; --dtype=; --device cuda:99x; --device=
        --backend=; -w skew-1; -w iid0; -w skew; -w skew1e9; -m -1; -m x; --width 0; --hidden -5; --out OUT
        --out /dev/full; --nonsense; extra; -m 0 -> must be at least 1; --graph -> --graph needs a GPU
        -w nonsense -> unknown workload 'nonsense'; --dtype int8 -> unknown dtype 'int8'
        --backend magic -> unknown backend 'magic'; --backend triton -> backend 'triton' is not available
        --device tpu -> unknown device 'tpu'; -w skew300 -> mean_nnz 300 does not fit 32 neurons""",
    f"bench train {FFN} --device cpu": """
        --seconds -1; --seconds nan; --dtype=; --device=; -m 0; --model --tokens 2; --batch 0; --length 0""",
    "bench decode --preset tiny --device cpu --context 2": """
        --seconds -1; --seconds nan; --preset x; -w x; --batch 0; --context 0; --device x; --device=""",
    "bench model MODEL --device cpu": """
        --seconds -1; --seconds nan; --shape 0x1; --shape x; --shape 1x100000; --shape 1x65; --preset tiny
        --depth 1; --text /none; --text MODEL; --device x; --shape 1x8 --generate --text OUT/empty.txt""",
    "bench model --device cpu": """
        --preset tiny --depth 0 -> --depth must be at least 1; --text TEXT; --layers; --preset tiny -w x
        --preset huge -> unknown preset 'huge'; -w none -> unknown workload 'none'""",
    "analyze MODEL": "-> model needs --text FILE: only the model that ships with twell, sample, has a text",
    "analyze MODEL --text TEXT": """
        --tokens 0; --tokens 1; --length 0; --length 65; --out OUT; --metrics TEXT; --speed TEXT
        --report OUT/x.html --speed TEXT; --report OUT/x.html --speed /none; --report OUT/x.html --metrics /none
        --report page.txt -> must end in .html; --speed rows.jsonl -> need --report""",
    "calibrate MODEL --text TEXT": "--tokens 0; --tokens -5; --text /none; --text MODEL",
    "eval MODEL": "--device cpu -> nothing to evaluate on",
    "eval MODEL --text TEXT": """
        --limit 0; --batch-size 0; --tasks x; --scorer x; --device x; --device=; --dtype x; --out OUT
        --data /none --scorer own; --data MODEL --scorer own; --last-words /none; --text OUT
        --text MODEL/model.safetensors; --text BAD.jsonl; --text BAD.u16; --text BAD.parquet; --text BAD.txt
        --last-words BAD.jsonl; --text missing.txt -> missing.txt""",
    "sweep --preset tiny --out OUT/sweep": """
        --seconds -1; --seconds nan; --l1 nan; steps=0; --l1 0 l1=3 -> leave out l1=3
        --target 0.01 target_active=3 -> leave out target_active=3; --ablation silu l1=3 -> leave out l1=3""",
    "generate MODEL": "-> the prompt is empty; -p '' -> the prompt is empty; -p a -p '' -> prompt 2 is empty",
    "generate MODEL -p hello": """
        --temperature inf; --top-p 0; --top-p nan; --seed -1; --seed 1208925819614629174706176; --dtype x; --device x
        --prompt-file /none; --prompt-file MODEL/model.safetensors; --prompt-file missing.txt -> missing.txt
        --prompt ' ' -> prompt 2 is empty; --prompt-file TEXT -> leaves room for 0 new ones
        --max-new-tokens 64 -> leaves room for; --max-new-tokens 0 -> '--max-new-tokens'
        --temperature -1 -> '--temperature'
        --temperature nan -> temperature
        --top-p 1.5 -> top-p must be above 0 and at most 1, got 1.5; --top-k 0 -> '--top-k'
        --top-k 3 --seed -3 -> '--seed'; --seed 3 -> seed has no effect on greedy generation
        --temperature 0 --top-p 0.5 -> top-p and top-k have no effect on greedy generation
        --stream --json -> --stream does not go with --json; --stream --compare -> --stream does not go with --compare
        --top-k 3 --compare -> are compared greedily; --compare --repeats 0 -> --repeats
        --chat -> the model has no chat template; --device abacus -> unknown device 'abacus'
        --dtype int8 -> unknown dtype 'int8'""",
    "compare": """
        --json; /none /none; TEXT; TEXT TEXT; ROWS; ROWS ROWS --floor -1; ROWS ROWS --floor nan
        ROWS ROWS --threshold -1; ROWS ROWS --threshold nan; ROWS ROWS --check x; ROWS ROWS --first x; ROWS --by x
        OUT OUT""",
    "convert MODEL": """
        --relufy; --check --out OUT/c; --out OUT/c --l1 nan; --out OUT/c lr=1""",
    "tune": "; -m 8",
    "train --out OUT/run": """
        steps=x; l1=; --data /none; --resume l1=1 -> run holds no run to resume; --preset huge -> unknown preset 'huge'
        nonsense=1 -> expected key=value""",
    "": "nonsense; --nonsense; bench nonsense",
}


@pytest.mark.usefixtures("without_the_interpreter")
@pytest.mark.parametrize(
    ("command", "options"),
    [(command, each) for command, several in OPTIONS.items() for each in re.split(r"\s*[;\n]\s*", several.strip())],
)
def test_bad_options_are_refused(
    twell: Twell, place: Path, tmp_path: Path, command: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    given, _, message = options.partition("->")
    result = twell(*filled(shlex.split(f"{command} {given}"), place, place / "model", tmp_path))
    assert_refused(result)
    assert message.strip() in result.stderr
    assert "BAD" not in options or str(place / "odd") in result.stderr


def test_tune_does_not_recommend_an_option_it_lacks(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = twell("tune")
    assert_refused(result)
    assert "--device" not in result.stderr and "torch sees none" in result.stderr


# -- rows -------------------------------------------------------------------------------------------------

SPREAD = {"p20": 1.0, "p50": 1.0, "p80": 1.0}
TIMES = {"dense_ms": SPREAD, "sparse_ms": SPREAD, "speedup": 1.5, "gpu": "G", "dtype": "bfloat16"}
LAYER = {"name": "model.layers.0.mlp", "tokens": 8, "mean_active": 3.0, "speedup": 1.5}
MODEL_ROW = {"bench": "model", "model": "x", "batch": 1, "length": 8, **TIMES, "ffns": [LAYER]}
FFN_ROW = {"bench": "ffn", "workload": "iid29", "M": 8, "D": 16, "F": 32, "mean_active": 3.0, "kind": "gated", **TIMES}
WRONG_FIELDS: list[dict[str, Any]] = [
    *({"dense_ms": wrong} for wrong in ("x", [1], None, {"p50": 1}, {**SPREAD, "p50": "1"}, {**SPREAD, "p50": -1})),
    *({"sparse_ms": wrong} for wrong in (5, {**SPREAD, "p80": float("nan")})),
    *({"speedup": wrong} for wrong in ("fast", None, [1], float("nan"), float("inf"), True)),
    *({"batch": wrong} for wrong in ("one", None, 0, 1.5)),
    *({"ffns": wrong} for wrong in ("x", 5, [5], [{"name": "x"}], [{**LAYER, "speedup": "1"}])),
    *({"memory": wrong} for wrong in (5, {"dense": 5}, {"dense": {"pass": "x"}})),
    *({"first_token_ms": wrong} for wrong in (5, {"dense": 5})),
    {"called_ms": {"dense": None}},
    {"bench": 5},
    {"model": 5},
]
WRONG_FFN_FIELDS: list[dict[str, Any]] = [
    {name: "x"} for name in ("M", "D", "F", "mean_active", "speedup", "dense_ms")
] + [{"workload": 5}, {"M": None}, {"D": 0}]
ROWS = [
    json.dumps({**row, **wrong})
    for row, some in ((MODEL_ROW, WRONG_FIELDS), (FFN_ROW, WRONG_FFN_FIELDS))
    for wrong in some
]


@pytest.fixture
def analysed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read before a model is: no time is lost."""
    monkeypatch.setattr(analyze, "load_model", lambda *_: pytest.fail("the model was loaded first"))


READERS = (
    "analyze MODEL --text TEXT --report OUT/x.html --speed OUT/rows.jsonl",
    "compare OUT/rows.jsonl OUT/rows.jsonl",
)


@pytest.mark.parametrize(
    ("command", "row"), [(READERS[i % 2], row) for i, row in enumerate([*ROWS, "[1]", "xx\nyy", "\udcff\n\n", "5"])]
)
def test_wrong_rows_are_refused(
    twell: Twell, place: Path, tmp_path: Path, command: str, row: str, analysed_before: None
) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n", errors="surrogateescape")
    result = twell(*filled(command.split(), place, place / "model", tmp_path))
    assert_refused(result)
    assert "rows.jsonl, line 1" in result.stderr


@pytest.mark.parametrize("row", ["", '{"bench": "other"}', json.dumps({**MODEL_ROW, "batch": 1} | {"bench": "sweep"})])
def test_rows_without_anything_to_show_are_refused(twell: Twell, place: Path, tmp_path: Path, row: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    command = "analyze MODEL --text TEXT --tokens 64 --report OUT/x.html --speed OUT/rows.jsonl"
    assert_refused(twell(*filled(command.split(), place, place / "model", tmp_path)))


@pytest.mark.parametrize(
    "row",
    ['{"step": "x", "ce_loss": 1}', '{"step": null}', '{"step": [1]}', '{"step": NaN}', '{"step": 1, "ce_loss": "x"}'],
)
def test_wrong_logs_of_training_are_refused(
    twell: Twell, place: Path, tmp_path: Path, row: str, analysed_before: None
) -> None:
    (tmp_path / "m.jsonl").write_text(row + "\n")
    command = "analyze MODEL --text TEXT --report OUT/x.html --metrics OUT/m.jsonl"
    result = twell(*filled(command.split(), place, place / "model", tmp_path))
    assert_refused(result)
    assert "m.jsonl, line 1" in result.stderr


# -- the boundary -----------------------------------------------------------------------------------------


def test_an_unexpected_error_says_so_and_how_to_report_it(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise KeyError("a key")

    monkeypatch.setattr("twell.workbench.bench.compare.compare_files", breaks)
    result = twell("compare", "a b", "c")
    assert result.returncode == errors.BUG != 0
    first, second = result.stderr.splitlines()
    assert first == "twell: unexpected error: KeyError: 'a key'"
    assert "report" in second and second.endswith("TWELL_TRACEBACK=1 twell compare 'a b' c")
    monkeypatch.setenv(errors.SHOW_TRACEBACK, "1")
    monkeypatch.setattr(sys, "argv", ["twell", "compare", "a", "b"])
    from twell.workbench import cli

    with pytest.raises(KeyError):
        cli.main()


def test_a_wrong_result_is_a_verdict(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise WrongResult("sparse dx is wrong")

    monkeypatch.setattr("twell.workbench.bench.compare.compare_files", breaks)
    result = twell("compare", "a", "b")
    assert (result.returncode, result.stderr) == (1, "twell: error: sparse dx is wrong\n")


WITHOUT_EXTRAS = """
import contextlib, importlib.abc, io, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "tokenizers", "safetensors", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from twell.workbench import cli
for line in sys.stdin.read().splitlines():
    sys.argv = ["twell", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            cli.main()
        except SystemExit as stop:
            print(stop.code, said.getvalue().strip().replace(chr(10), " // "), file=sys.__stdout__)
"""


def test_a_missing_extra_is_named(place: Path, tmp_path: Path) -> None:
    commands = [
        "sweep --preset tiny --out OUT/sweep",
        "eval MODEL --text TEXT",
        "bench model --preset tiny",
        "bench model MODEL",
        "bench decode --preset tiny",
        "bench train --model --preset tiny",
        "calibrate MODEL --text TEXT",
        "analyze MODEL --text TEXT",
        "generate MODEL -p x",
        "convert MODEL --check",
        "train --out OUT/run",
        "doctor MODEL",
        "serve MODEL --port 0",
    ]
    asked = "\n".join(" ".join(filled(command.split(), place, place / "model", tmp_path)) for command in commands)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], input=asked, capture_output=True, text=True, env=dict(os.environ)
    )
    said = ran.stdout.splitlines()
    assert len(said) == len(commands), ran.stdout + ran.stderr
    for command, line in zip(commands, said, strict=True):
        extra = "serve" if command.startswith("serve") else "train"
        assert line.startswith("2 twell: error: ") and f"pip install 'twell[{extra}]'" in line, (command, line)
        assert " // " not in line


def test_a_package_of_another_version_is_named() -> None:
    said, code = errors.explain(ImportError("cannot import name 'X' from 'transformers' (path)", name="transformers"))
    assert code == errors.BAD_INPUT and "another version of transformers (cannot import name 'X'" in said
    assert said.endswith("pip install -U 'twell[train]'")


def test_a_warning_is_one_line() -> None:
    assert errors.one_line(UserWarning("odd"), UserWarning, "file.py", 3) == "twell: warning: odd\n"


def test_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert common.device_of(None).type == expected
