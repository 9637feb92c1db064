"""Which blocks ``sparsify_`` takes: exact classes or by request, nothing left over, and the same results."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import twell
from twell import cpu
from twell.hf import check
from twell.hf.known import KNOWN, REFUSED, class_name

D, F = 32, 64
CONFIG: dict[str, Any] = {"hidden_size": D, "intermediate_size": F, "num_attention_heads": 2, "vocab_size": 61}


class Block(nn.Module):
    """A gated FFN of a class that nobody knows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(D, F, bias=False, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(F, D, bias=False, dtype=dtype)
        self.act_fn = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class WithAdapter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(D, D, bias=False)
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


class WithScale(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class WithDropout(Block):
    """So rare that the norm of a result does not show it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 2e-3, self.training)


class WithClamp(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x))


class Zeroed(Block):
    """Whatever it computes gives 0."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down_proj.weight)


class Raising(Block):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("not today")


class ReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1e6)


class OtherReLU(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = ReLU()


def llama_mlp(change: Callable[[Any], Any] = lambda mlp: None, cls: type = LlamaMLP) -> nn.Module:
    mlp = cls(LlamaConfig(**CONFIG, hidden_act="relu"))
    change(mlp)
    return mlp


class Subclass(LlamaMLP):
    pass


BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "more parts": (WithAdapter, "it has more parts than an FFN: adapter"),
    "a buffer": (WithScale, "it has more parts than an FFN: scale"),
    "dropout": (WithDropout, "something else in training mode"),
    "dropout, bf16": (lambda: WithDropout(torch.bfloat16), "something else in training mode"),
    "clamp": (WithClamp, "its forward is not that of a gated FFN"),
    "zero": (Zeroed, "its results are all 0"),
    "raises": (Raising, "cannot be run to check it: AssertionError: not today"),
    "another ReLU": (OtherReLU, "act_fn is test_known.ReLU, not torch.nn.ReLU"),
    "a forward of its own": (
        lambda: llama_mlp(lambda mlp: setattr(mlp, "forward", lambda x: mlp.down_proj(mlp.up_proj(x)))),
        "it has a forward of its own",
    ),
    "an adapter in a known one": (
        lambda: llama_mlp(lambda mlp: mlp.register_module("adapter", nn.Linear(D, D))),
        "it has more parts than an FFN: adapter",
    ),
    "the activation's own forward": (
        lambda: llama_mlp(lambda mlp: setattr(mlp.act_fn, "forward", torch.sigmoid)),
        "act_fn has a forward of its own",
    ),
    "bilinear": (
        lambda: llama_mlp(lambda mlp: setattr(mlp, "up_proj", nn.Bilinear(D, D, F))),
        "up_proj is Bilinear, not a plain nn.Linear",
    ),
    "meta": (lambda: llama_mlp().to("meta"), "weights are on the meta device"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_is_more_or_other_than_an_ffn_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the sparse code from as many tokens on as users have it
    make, reason = BLOCKS[name]
    torch.manual_seed(0)
    block = make()
    model = nn.ModuleList([block]).eval()
    before, random_state = model.state_dict(), torch.get_rng_state()
    [row] = twell.sparsify_(model, also=type(block)).rows
    assert row.kind == "left alone" and row.became is None and reason in row.why, row
    assert model[0] is block and model.state_dict().keys() == before.keys()
    assert torch.equal(torch.get_rng_state(), random_state) and not any(m.training for m in model.modules())


def test_unknown_classes_are_taken_only_by_request() -> None:
    """Subclasses of known ones are unknown: they may compute something else."""
    for make in (Block, lambda: llama_mlp(cls=Subclass)):
        block = make()
        [row] = twell.sparsify_(nn.ModuleList([block])).rows
        name = class_name(type(block))
        assert row.kind == "left alone" and f"{name} is no known class; pass also='{name}'" in row.why
        for also in (type(block), name, [name], lambda b, block=block: b is block):
            model = nn.ModuleList([block]).eval()
            expected = block(torch.ones(3, D))
            assert [row.kind for row in twell.sparsify_(model, also=also).rows] == ["sparse"]
            torch.testing.assert_close(model[0](torch.ones(3, D)), expected)
            twell.desparsify_(model)
            assert model[0] is block
    with pytest.raises(ValueError, match="also takes classes, full names of classes or a function of a block, got 3"):
        twell.sparsify_(nn.ModuleList(), also=[3])  # type: ignore[list-item]


def test_a_known_block_may_be_zero() -> None:
    """As some are at initialisation: its class tells what it computes."""
    block = llama_mlp(lambda mlp: nn.init.zeros_(mlp.down_proj.weight))
    assert twell.sparsify_(nn.ModuleList([block])).n_sparse == 1


def test_dropout_of_an_adapter_is_no_reason() -> None:
    class Adapted(nn.Module):
        in_features, out_features = D, F

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.base(nn.functional.dropout(x, 0.5, self.training))

    block = llama_mlp(lambda mlp: setattr(mlp, "up_proj", Adapted(mlp.up_proj)))
    [row] = twell.sparsify_(nn.ModuleList([block])).rows
    assert row.kind == "called" and "up_proj is Adapted" in row.why


def test_the_check_is_of_tokens_for_which_the_sparse_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    blocks: list[int] = []
    run = cpu.block.Block.run
    monkeypatch.setattr(cpu.block.Block, "run", lambda self, *a: (blocks.append(len(self.x)), run(self, *a))[1])
    ffn = twell.GatedSparseFFN(128, 256)
    assert check.why_not_the_same(ffn, ffn, must_tell=True) is None
    assert blocks
    x = check._tokens(ffn)
    assert x.abs().max() > 1000 and x[0, 0].abs().max() < 10


def test_classes_in_the_tables_are_there() -> None:
    for name in (*KNOWN, *REFUSED):
        found = class_called(name)
        assert found is None or class_name(found) == name


@pytest.mark.parametrize("name", KNOWN)
def test_known_classes_compute_the_formula(name: str) -> None:
    """By the source of the installed transformers; a later one that changes a class is to be seen here."""
    if (cls := class_called(name)) is None:
        pytest.skip("not in this version of transformers")
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    projections, activation, is_inline = KNOWN[name]
    calls = [f"self.{part}(" for part in (*projections, activation)]
    lines = [line.strip() for line in ast.unparse(tree).splitlines()]
    steps = [line for line in lines if any(call in line for call in calls)]
    x = "hidden_states" if is_inline else tree.args.args[1].arg
    if is_inline:  # nothing but these steps changes what they hand on
        between = lines[lines.index(steps[0]) : lines.index(steps[-1])]
        assert all(line in steps for line in between if line.startswith(f"{x} ="))
    else:  # there is nothing else
        assert lines[1:] in (steps, [*steps, f"return {steps[-1].partition(' = ')[0]}"])
    values = {x: "X"}
    for step in steps:
        target, _, value = step.removeprefix("return ").rpartition(" = ")
        values["y"] = values[target] = re.sub(r"(?<![.\w])\w+(?![\w(.])", lambda name: values[name[0]], value)
    up, down = projections[-2:]
    h = f"self.{activation}(self.{projections[0]}(X))" + (f" * self.{up}(X)" if len(projections) == 3 else "")
    assert values["y"] == f"self.{down}({h})"


def class_called(name: str) -> Any:
    module_name, _, class_ = name.rpartition(".")
    if importlib.util.find_spec(module_name.rpartition(".")[0]) is None:
        return None
    return getattr(importlib.import_module(module_name), class_)


def test_what_was_put_into_a_sparse_layer_moves_to_its_dense_block() -> None:
    model = nn.ModuleList([llama_mlp()]).eval()
    dense: Any = model[0]
    twell.sparsify_(model)
    adapted = nn.Linear(D, F, bias=False)
    model[0].gate_proj = adapted  # type: ignore[assignment]
    model[0].adapter = nn.Linear(D, D)  # type: ignore[assignment]
    names = model.state_dict().keys()
    twell.desparsify_(model)
    assert model[0] is dense and dense.gate_proj is adapted
    assert model.state_dict().keys() == names


class Quantised(Tensor):
    """As torchao's: a tensor subclass that knows a few operations."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (nn.functional.linear, Tensor.matmul, Tensor.t):
            raise AssertionError("quantised weights take no tokens of this kind")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_of_other_types_are_skipped_and_not_raised_about() -> None:
    block = llama_mlp()
    weight = block.up_proj.weight.detach().as_subclass(Quantised)  # type: ignore[union-attr]
    block.up_proj.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]
    model = nn.ModuleList([block, llama_mlp()])
    rows = twell.sparsify_(model).rows
    assert [row.kind for row in rows] == ["left alone", "sparse"]
    assert "AssertionError: quantised weights take no tokens of this kind" in rows[0].why


def test_models_that_have_none_are_told_what_was_looked_for() -> None:
    report = twell.sparsify_(nn.ModuleList([nn.Linear(D, F)]))
    for text in (str(report), report.summary()):
        assert "looked for modules with gate_proj, up_proj, down_proj; up_proj, down_proj; fc1, fc2; dense_h" in text


@pytest.mark.parametrize(
    "function",
    [twell.sparsify_, twell.desparsify_, twell.freeze_, twell.thaw_, twell.refresh_, twell.restore_layout_],
)
def test_a_name_is_no_model(function: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got str; load it first"):
        function("gpt2")


def test_opt_layers_of_other_classes_are_left_alone() -> None:
    config = OPTConfig(hidden_size=D, ffn_dim=F, num_attention_heads=2, num_hidden_layers=1, vocab_size=61)
    model: Any = AutoModelForCausalLM.from_config(config)
    layer = model.model.decoder.layers[0]
    layer.__class__ = type("OPTDecoderLayer", (type(layer),), {})
    assert "computes fc2(act(fc1(x))) and nothing else" in twell.sparsify_(model).rows[0].why
    assert "it has more parts than an FFN: self_attn" in twell.sparsify_(model, also=type(layer)).rows[0].why
