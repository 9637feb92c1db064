"""A layer computes with its weights as they are at the moment of the call, however they were written."""

from __future__ import annotations

import copy
import datetime
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.multiprocessing import get_context
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

import twell
from twell import cpu
from twell.hf import LlamaSparseReluConfig
from twell.nn import GatedSparseFFN, SparseFFNBase, neuron_major_

D, F = 64, 256
PART = slice(4, 12)  # of a weight's rows: no sample of a few elements would see it
TOKENS = (1, 64)
each_layout = pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "neuron-major"])


@pytest.fixture(autouse=True)
def int8_gates_of_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.frozen, "MIN_INT8_GATE", 0)
    monkeypatch.setattr(cpu.products, "blas_habits", lambda: cpu.products.BlasHabits(int8_gate=True))


def make_layer(strided: bool, **options: Any) -> GatedSparseFFN:
    """About 5 % of its neurons are active for ``tokens``."""
    layer = GatedSparseFFN(D, F, **options).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
        layer.gate_proj.weight[:, 0] = -13
    if strided:
        neuron_major_(layer.down_proj)
        assert layer.down_proj.weight.t().is_contiguous()
    return layer


def tokens(M: int, like: Tensor) -> Tensor:
    x = torch.randn(M, D, generator=torch.Generator().manual_seed(M)).to(like)
    x[:, 0] = 1
    return x


def dense(layer: SparseFFNBase, x: Tensor) -> Tensor:
    """The formula, on copies of the weights."""
    gate, up, down = (getattr(layer, name).weight.detach().clone() for name in ("gate_proj", "up_proj", "down_proj"))
    return (torch.relu(x @ gate.t()) * (x @ up.t())) @ down.t()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@torch.no_grad()
def outputs(layer: nn.Module) -> list[Tensor]:
    weight = next(layer.parameters())
    return [layer(tokens(M, weight)) for M in TOKENS]


@torch.no_grad()
def assert_dense(layer: Any, tolerance: float = 1e-5) -> None:
    for M, got in zip(TOKENS, outputs(layer), strict=True):
        expected = dense(layer, tokens(M, layer.down_proj.weight))
        assert error(got, expected) < tolerance, f"{M} tokens"


def assert_follows(layer: Any, write: Callable[[Any], None]) -> None:
    """Call, write, call again."""
    before = outputs(layer)
    assert_dense(layer)
    write(layer)
    assert_dense(layer)
    assert all(error(a, b) > 0.05 for a, b in zip(outputs(layer), before, strict=True))  # the write matters


# -- Ways to write ---------------------------------------------------------------------------------------


def new_values(layer: nn.Module) -> dict[str, Tensor]:
    """Contiguous copies of the weights with eight rows changed."""
    values = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in layer.named_parameters()}
    for value in values.values():
        value[PART] += torch.randn_like(value[PART])
    return values


def pairs(layer: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    return list(zip(layer.parameters(), new_values(layer).values(), strict=True))


def part_of_data(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        p.data[PART] = value[PART]


def add_to_data(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        p.data.add_(value - p.data)


def copy_to_data(layer: nn.Module) -> None:
    """As frameworks for reinforcement learning send new weights to an engine."""
    for p, value in pairs(layer):
        p.data.copy_(value)


def numpy(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        p.detach().numpy()[PART] = value[PART].numpy()


def dlpack(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        torch.from_dlpack(p.detach())[PART] = value[PART]


def storage(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        p.untyped_storage().copy_(torch.empty_like(p).copy_(value).untyped_storage())


def foreach_on_data(layer: nn.Module) -> None:
    parameters, values = zip(*pairs(layer), strict=True)
    torch._foreach_add_([p.data for p in parameters], [v - p.data for p, v in zip(parameters, values, strict=True)])


def exchange_with_an_average(layer: nn.Module) -> None:
    """As averages of weights are put in for an evaluation, by copies."""
    for p, average in pairs(layer):
        kept = p.data.clone()
        p.data.copy_(average)
        average.copy_(kept)


def fused_kernel(layer: nn.Module) -> None:
    """As a fused optimiser outside torch.optim does."""
    parameters, values = zip(*pairs(layer), strict=True)
    steps = [p.detach() - v for p, v in zip(parameters, values, strict=True)]
    torch._fused_sgd_(
        list(parameters),
        steps,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], None]:
    def step(layer: nn.Module) -> None:
        for p, value in pairs(layer):
            p.grad = p.detach() - value  # zero outside of the part
        make(layer.parameters(), lr=1.0, **options).step()

    return step


def merge_lora(layer: nn.Module) -> None:
    """``merge_and_unload`` writes ``weight.data`` and puts the linears back."""
    merged = with_lora(layer).merge_and_unload()
    assert all(type(getattr(merged, name)) is nn.Linear for name in ("gate_proj", "up_proj", "down_proj"))


UNSEEN = {
    "part of .data": part_of_data,
    ".data.add_": add_to_data,
    ".data.copy_": copy_to_data,
    "numpy": numpy,
    "dlpack": dlpack,
    "storage": storage,
    "foreach on .data": foreach_on_data,
    "exchange with an average": exchange_with_an_average,
    "a fused kernel": fused_kernel,
    "fused AdamW": optimizer(torch.optim.AdamW, fused=True, weight_decay=0.0),
    "LoRA merged": merge_lora,
}


def in_place(layer: nn.Module) -> None:
    with torch.no_grad():
        for p, value in pairs(layer):
            p[PART] = value[PART]


def in_inference_mode(layer: nn.Module) -> None:
    with torch.inference_mode():
        for p, value in pairs(layer):
            p[PART] = value[PART].clone()


def foreach(layer: nn.Module) -> None:
    parameters, values = zip(*pairs(layer), strict=True)
    with torch.no_grad():
        torch._foreach_copy_(parameters, values)


def load(layer: nn.Module) -> None:
    layer.load_state_dict(new_values(layer))


def load_and_assign(layer: nn.Module) -> None:
    layer.load_state_dict(new_values(layer), assign=True)


def other_data(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        p.data = value


def exchange_data(layer: nn.Module) -> None:
    for p, average in pairs(layer):
        p.data, average.data = average.data, p.data


def other_parameters(layer: nn.Module) -> None:
    for name, value in new_values(layer).items():
        linear, _, weight = name.rpartition(".")
        setattr(layer.get_submodule(linear), weight, nn.Parameter(value))


def swap(layer: nn.Module) -> None:
    for p, value in pairs(layer):
        torch.utils.swap_tensors(p, nn.Parameter(value))


def from_a_vector(layer: nn.Module) -> None:
    vector = torch.cat([value.flatten() for value in new_values(layer).values()])
    nn.utils.vector_to_parameters(vector, layer.parameters())


def another_dtype(layer: nn.Module) -> None:
    in_place(layer)
    layer.to(torch.float64)


def another_dtype_by_swapping(layer: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        another_dtype(layer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


SEEN = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "foreach": foreach,
    "SGD": optimizer(torch.optim.SGD),
    "load_state_dict": load,
    "load_state_dict, assign": load_and_assign,
    "other .data": other_data,
    "exchange of .data": exchange_data,
    "other parameters": other_parameters,
    "swap_tensors": swap,
    "from a vector": from_a_vector,
    "another dtype": another_dtype,
    "another dtype by swapping": another_dtype_by_swapping,
}


@each_layout
@pytest.mark.parametrize("way", UNSEEN | SEEN)
def test_the_next_call_uses_the_new_weights(way: str, strided: bool) -> None:
    assert_follows(make_layer(strided), (UNSEEN | SEEN)[way])


@each_layout
@pytest.mark.parametrize("way", ["part of .data", "numpy", "fused AdamW", "in place", "swap_tensors"])
def test_training_uses_the_new_weights(way: str, strided: bool) -> None:
    layer = make_layer(strided).train()
    x, dy = tokens(300, layer.down_proj.weight), torch.randn(300, D)
    layer(x).backward(dy)
    layer.zero_grad()
    (UNSEEN | SEEN)[way](layer)
    layer.zero_grad()
    layer(x).backward(dy)
    gate, up, down = weights = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    ((torch.relu(x @ gate.t()) * (x @ up.t())) @ down.t()).backward(dy)
    for p, w in zip(layer.parameters(), weights, strict=True):
        assert error(p.grad, w.grad) < 1e-5


def test_other_weights_for_a_call() -> None:
    layer = make_layer(False)
    outputs(layer)
    x, values = tokens(64, layer.down_proj.weight), new_values(layer)
    twin = make_layer(False)
    twin.load_state_dict(values)
    with torch.no_grad():
        assert error(torch.func.functional_call(layer, values, x), dense(twin, x)) < 1e-5
    assert_dense(layer)


# -- Frozen layers ---------------------------------------------------------------------------------------


@each_layout
@pytest.mark.parametrize("way", UNSEEN)
def test_frozen_and_refreshed(way: str, strided: bool) -> None:
    layer = make_layer(strided)
    twell.freeze_(layer)
    assert layer.frozen is not None

    def write(layer: nn.Module) -> None:
        UNSEEN[way](layer)
        twell.refresh_(layer)

    assert_follows(layer, write)
    assert layer.frozen is not None


@each_layout
@pytest.mark.parametrize("way", SEEN)
def test_frozen_and_visibly_changed(way: str, strided: bool) -> None:
    layer = make_layer(strided)
    twell.freeze_(layer)
    assert_follows(layer, SEEN[way])
    assert layer.frozen is not None


def test_frozen_layers_read_their_own_copies() -> None:
    """Otherwise the tests above would prove nothing."""
    layer = make_layer(False)
    twell.freeze_(layer)
    assert layer.frozen_bytes() > 0
    assert_dense(layer)
    part_of_data(layer)
    with pytest.raises(AssertionError):
        assert_dense(layer)
    twell.thaw_(layer)
    assert layer.frozen is None and layer.frozen_bytes() == 0
    assert_dense(layer)


@pytest.mark.parametrize("let_go", [twell.thaw_, lambda layer: layer.train()], ids=["thaw_", "train"])
def test_thaw_and_train_drop_frozen_state(let_go: Callable[[nn.Module], Any]) -> None:
    layer = make_layer(False)
    twell.freeze_(layer)
    outputs(layer)
    let_go(layer)
    assert layer.frozen is None
    part_of_data(layer)
    assert_dense(layer)


def test_frozen_and_another_parameter_at_the_same_address() -> None:
    """Freed memory is soon reused, and a new parameter has the version of the old one."""
    layer = make_layer(False)
    memory = layer.down_proj.weight.detach().clone().numpy()
    layer.down_proj.weight = nn.Parameter(torch.from_numpy(memory))
    twell.freeze_(layer)
    outputs(layer)
    memory[PART] += 1
    layer.down_proj.weight = nn.Parameter(torch.from_numpy(memory))
    assert_dense(layer)


def test_a_copy_of_a_frozen_layer_has_its_own_state() -> None:
    layer = make_layer(False)
    twell.freeze_(layer)
    outputs(layer)
    twin = copy.deepcopy(layer)
    in_place(twin)
    assert_dense(twin)
    assert_dense(layer)


# -- Adapters, processes, shards -------------------------------------------------------------------------


def with_lora(layer: nn.Module) -> Any:
    """PEFT's wrapper of the layer; its adapters act on eight rows of each weight."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    config = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    wrapped = LoraModel(layer, config, "default")
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.zero_()
                p[PART] = torch.randn_like(p[PART])
    return wrapped


@each_layout
def test_adapters_merged_in_place_and_taken_out_again(strided: bool) -> None:
    layer = make_layer(strided)
    before = outputs(layer)
    wrapped = with_lora(layer)
    adapted = outputs(layer)
    wrapped.merge_adapter()
    for a, b, c in zip(outputs(layer), adapted, before, strict=True):
        assert error(a, b) < 1e-5 and error(a, c) > 0.05
    wrapped.unmerge_adapter()
    assert all(error(a, b) < 1e-5 for a, b in zip(outputs(layer), adapted, strict=True))
    wrapped.unload()
    assert all(error(a, b) < 1e-5 for a, b in zip(outputs(layer), before, strict=True))


WRITE_SHARED = "for w, value in zip(weights, values, strict=True): w[part] = value[part]"


def test_another_process() -> None:
    layers = [make_layer(strided).share_memory() for strided in (False, True)]
    before = [outputs(layer) for layer in layers]
    weights = [p.detach() for layer in layers for p in layer.parameters()]
    values = [value for layer in layers for value in new_values(layer).values()]
    given = {"weights": weights, "values": values, "part": PART}
    process = get_context("spawn").Process(target=exec, args=(WRITE_SHARED, given))  # need not import this file
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for layer, old in zip(layers, before, strict=True):
        assert_dense(layer)
        assert all(error(a, b) > 0.05 for a, b in zip(outputs(layer), old, strict=True))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sharded", ["the layer", "a projection"])
def test_rewritten_shards(one_rank: None, sharded: str) -> None:
    """FSDP2 gathers weights into memory that it frees and uses again, and moves no version counter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = make_layer(False)
    twin = copy.deepcopy(layer)
    shards = {"the layer": layer, "a projection": layer.down_proj}[sharded]
    fully_shard(shards, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    for _ in range(3):
        for a, b in zip(outputs(layer), outputs(twin), strict=True):
            assert error(a, b) < 1e-5
        assert_dense(twin)
        values = new_values(twin)
        twin.load_state_dict(values)
        for name, p in layer.named_parameters():
            getattr(p, "_local_tensor", p).data[PART] = values[name][PART]


def test_a_broadcast_between_layouts() -> None:
    """Gloo sends memory as it lies: ranks must agree on it, and ``restore_layout_`` makes them."""
    source, target = make_layer(True), make_layer(False)
    assert twell.restore_layout_(source) == 1
    assert twell.restore_layout_(source) == 0
    assert_dense(source)
    store, failures = dist.HashStore(), []

    def rank(i: int, layer: nn.Module) -> None:
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), i, 2, datetime.timedelta(seconds=60))
            for p in layer.parameters():
                group.broadcast([p.detach()], dist.BroadcastOptions()).wait()
        except Exception as problem:
            failures.append(problem)

    threads = [threading.Thread(target=rank, args=pair) for pair in enumerate((source, target))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(p, q)
    assert_dense(target)


# -- Models: files, state dicts, memory ------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": 0,
}
OPT_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE, hidden_act="relu"),
    "llama_sparse_relu": lambda: LlamaSparseReluConfig(**SHAPE),
    "opt": lambda: OPTConfig(**OPT_SHAPE),
}
each_model = pytest.mark.parametrize("kind", MODELS)
IDS = torch.arange(1, 41).view(2, 20)


def model_of(kind: str) -> Any:
    """A model in which few neurons fire."""
    model = AutoModelForCausalLM.from_config(MODELS[kind]()).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("gate_proj.weight", "fc1.weight")):
                p[20:] = 0
    return model


def down_weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith(("down_proj.weight", "fc2.weight"))]


@each_model
def test_sparsify_sets_the_layout_of_models_that_are_not_in_training(kind: str) -> None:
    model = model_of(kind)
    parameters = list(model.parameters())
    twell.sparsify_(model.train())
    assert all(p.is_contiguous() for p in model.parameters())
    twell.sparsify_(model.eval())
    assert len(down_weights(model)) == 2 and all(w.t().is_contiguous() for w in down_weights(model))
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    twell.desparsify_(model)
    assert all(p.is_contiguous() for p in model.parameters())
    twell.sparsify_(model)
    assert twell.restore_layout_(model) == 2
    assert all(p.is_contiguous() for p in model.parameters())


@each_model
def test_files_are_those_of_the_dense_model(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "dense")
    twell.sparsify_(model)
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path / "sparse")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("dense", "sparse")]
    assert files[0] == files[1]
    with safe_open(tmp_path / "sparse" / "model.safetensors", "pt") as file:
        assert all(file.get_tensor(name).is_contiguous() for name in file.keys())  # noqa: SIM118
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    for name, p in model.named_parameters():
        assert torch.equal(again.get_parameter(name), p)
    twell.sparsify_(again)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, expected)


@each_model
def test_the_state_dict_is_the_parameters(kind: str) -> None:
    model = model_of(kind)
    keys = list(model.state_dict())
    twell.sparsify_(model)
    state = model.state_dict()
    assert list(state) == keys
    for name, p in model.named_parameters():
        assert state[name].data_ptr() == p.data_ptr() and state[name].stride() == p.stride()
    with torch.no_grad():
        before = model(IDS).logits
        for w in down_weights(model):
            w.data.mul_(2)
        doubled = model(IDS).logits
        model.load_state_dict(
            {
                name: t / 2 if t.data_ptr() in {w.data_ptr() for w in down_weights(model)} else t
                for name, t in state.items()
            }
        )
        assert error(doubled, before) > 1e-3 and error(model(IDS).logits, before) < 1e-6


def bytes_of_tensors() -> int:
    """Bytes of all live tensors."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@each_model
def test_a_sparsified_model_is_as_large_as_the_dense_one(kind: str) -> None:
    model = model_of(kind)
    size = sum(p.numel() * p.element_size() for p in model.parameters())

    @torch.no_grad()
    def run() -> None:
        for M in (1, 20):
            model(IDS[:1, :M])

    dense_bytes = bytes_of_tensors()
    twell.sparsify_(model)
    run()
    assert bytes_of_tensors() - dense_bytes <= 0.02 * size
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    assert sum(held.values()) <= 1.02 * size


def test_frozen_bytes_are_counted() -> None:
    model = model_of("llama")
    twell.sparsify_(model)
    before = bytes_of_tensors()
    twell.freeze_(model)
    counted = sum(layer.mlp.frozen_bytes() for layer in model.model.layers)
    assert abs(bytes_of_tensors() - before - counted) <= 4096
    twell.thaw_(model)
    assert bytes_of_tensors() - before <= 4096


# -- The GPU ---------------------------------------------------------------------------------------------

GPU_D, GPU_F = 256, 1024


def planned_layer(strided: bool, device: str, dtype: torch.dtype) -> GatedSparseFFN:
    """With a plan by which both few and many tokens run sparsely."""
    width, neurons = (GPU_D, GPU_F) if device == "cuda" else (D, F)
    layer = GatedSparseFFN(width, neurons, device=device, dtype=dtype, backend="triton").eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
        layer.gate_proj.weight[:, 0] = -2 * width**0.5
    if strided:
        neuron_major_(layer.down_proj)
    few = 64 if device == "cuda" else 4  # the interpreter is slow
    layer.set_plan(twell.Plan(n_neurons=neurons, hot=torch.arange(64), cap=32, min_tokens=few + 1, few_tokens=few))
    return layer


def planned_tokens(M: int, layer: GatedSparseFFN) -> Tensor:
    weight = layer.gate_proj.weight
    x = torch.randn(M, weight.shape[1], generator=torch.Generator().manual_seed(M)).to(weight)
    x[:, 0] = 1
    return x


@torch.no_grad()
def assert_planned(layer: GatedSparseFFN, x: Tensor, got: Tensor) -> None:
    """The error is at most twice that of PyTorch's dense layer in this dtype."""
    exact = dense(copy.deepcopy(layer).double(), x.double())
    assert error(got, exact) <= max(2 * error(dense(layer, x), exact), 1e-5)


GPU_WAYS = {
    name: (UNSEEN | SEEN)[name]
    for name in (
        "part of .data",
        ".data.copy_",
        "foreach on .data",
        "fused AdamW",
        "in place",
        "load_state_dict",
        "other .data",
        "load_state_dict, assign",
        "swap_tensors",
    )
}
IN_PLACE = ("part of .data", ".data.copy_", "foreach on .data", "fused AdamW", "in place", "load_state_dict")


def assert_planned_follows(layer: GatedSparseFFN, way: str, M: int, frozen: bool) -> None:
    if frozen:
        twell.freeze_(layer)
    with torch.no_grad():
        x = planned_tokens(M, layer)
        assert_planned(layer, x, layer(x))
        GPU_WAYS[way](layer)
        if frozen and way in UNSEEN:
            twell.refresh_(layer)
        assert_planned(layer, x, layer(x))


@pytest.mark.parametrize("M", [1, 10])
@pytest.mark.parametrize(("strided", "frozen"), [(False, False), (True, False), (False, True)])
def test_planned_layers_in_the_interpreter(M: int, frozen: bool, strided: bool) -> None:
    assert_planned_follows(planned_layer(strided, "cpu", torch.float32), "part of .data", M, frozen)


@pytest.mark.gpu
@each_layout
@pytest.mark.parametrize("frozen", [False, True], ids=["not frozen", "frozen"])
@pytest.mark.parametrize("M", [1, 40, 300])
@pytest.mark.parametrize("way", GPU_WAYS)
def test_planned_layers_use_the_new_weights(way: str, M: int, frozen: bool, strided: bool) -> None:
    assert_planned_follows(planned_layer(strided, "cuda", torch.bfloat16), way, M, frozen)


@pytest.mark.gpu
@each_layout
@pytest.mark.parametrize("frozen", [False, True], ids=["not frozen", "frozen"])
@pytest.mark.parametrize("M", [1, 40, 300])
@pytest.mark.parametrize("way", IN_PLACE)
def test_replays_use_the_new_weights(way: str, M: int, frozen: bool, strided: bool) -> None:
    layer = planned_layer(strided, "cuda", torch.bfloat16)
    if frozen:
        twell.freeze_(layer)
    x = planned_tokens(M, layer)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(2):
            graph.replay()
            assert_planned(layer, x, y)
            GPU_WAYS[way](layer)
            if frozen:
                twell.refresh_(layer)
        graph.replay()
        assert_planned(layer, x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 40, 300])
def test_a_call_that_sees_a_change_updates_replays(M: int) -> None:
    """Frozen state is rewritten where it lies."""
    layer = planned_layer(False, "cuda", torch.bfloat16)
    twell.freeze_(layer)
    x = planned_tokens(M, layer)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        in_place(layer)
        layer(planned_tokens(2, layer))
        graph.replay()
        assert_planned(layer, x, y)


@each_layout
def test_compiled_code_sees_changes_of_frozen_layers(strided: bool) -> None:
    """It is compiled once, and checks for changed weights when it runs."""
    layer = make_layer(strided)
    layer.freeze()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        first = compiled(tokens(1, layer.down_proj.weight))
        for p in layer.parameters():
            p.mul_(-2)  # other neurons fire
        assert error(compiled(tokens(1, first)), dense(layer, tokens(1, first))) < 1e-5
        layer.gate_proj.weight = nn.Parameter(layer.gate_proj.weight * -1)
        assert error(compiled(tokens(1, first)), dense(layer, tokens(1, first))) < 1e-5
        assert layer.frozen is not None and layer.frozen.nbytes > 0


def test_a_captured_layer_keeps_its_plan_if_another_is_refused() -> None:
    layer = make_layer(True)
    layer.freeze()
    before, layer.frozen._make = layer.plan, lambda *_: [torch.zeros(1)]  # type: ignore[union-attr, method-assign, assignment]
    layer.frozen.is_captured = True  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        layer.set_plan(twell.plan.dense_plan(F))
    assert layer.plan is before
