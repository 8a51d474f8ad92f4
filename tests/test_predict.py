"""vramx.predict: the peak of a step that is not run, against steps that are, and what it leaves."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from plan_tools import Skipping, Stack
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

import vramx
from vramx.compression.codec import bytes_of
from vramx.compression.config import Format
from vramx.errors import InvalidValueError, UntraceableError
from vramx.nn.rotary import rotary
from vramx.planning.meters import HostMeter
from vramx.planning.predict import CONTEXT_BYTES, CUBLAS_BYTES
from vramx.planning.recording import BACKWARD, FORWARD, OPTIMIZER

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "one by one": functools.partial(torch.optim.AdamW, foreach=False),
}
STEP_COUNTER_BYTES = 4  # of AdamW, a parameter


def rows(count: int) -> Tensor:
    return torch.randn(count, 8)


def encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 32), *layers)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(8, 16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


MODELS: dict[str, tuple[Any, Any]] = {
    "perceptrons": (Stack, lambda: rows(64)),
    "convolutions": (Skipping, lambda: torch.randn(2, 1, 32, 32)),
    "transformer": (encoder, lambda: torch.randn(4, 8, 8)),
    "recurrent": (Recurrent, lambda: torch.randn(4, 6, 8)),
    "checkpointed": (Checkpointed, lambda: rows(64)),
}


def measured_bytes(step: Any, model: nn.Module, *others: Tensor) -> int:
    """Return the peak of two real steps on the host."""
    meter = HostMeter(model, others)
    with meter.watching():
        step()
        step()
    return meter.peak_bytes()


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*((kind, "AdamW") for kind in MODELS), *(("perceptrons", name) for name in OPTIMIZERS)],
)
def test_a_prediction_is_what_real_steps_take(kind: str, optimizer: str) -> None:
    make, sample = MODELS[kind]
    model, x = make(), sample()
    learner = OPTIMIZERS[optimizer](model.parameters())

    def step() -> None:
        learner.zero_grad()
        model(x).float().mean().backward()
        learner.step()

    predicted = vramx.predict(step, device="cpu", policies="live").peak_bytes()
    counters = STEP_COUNTER_BYTES * len(list(model.parameters()))
    real = measured_bytes(step, model, x)
    # A host's steps are counted by numbers that torch.tensor() makes where no mode sees it.
    assert real <= predicted <= real + (counters if "AdamW" in repr(type(learner)) else 0)


def test_a_prediction_is_that_of_torchs_tracker() -> None:
    model, x = Stack(3), rows(64)
    learner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(x).float().mean().backward()
        learner.step()
        learner.zero_grad()

    predicted = vramx.predict(step, device="cpu", policies="live").peak_bytes()
    tracker = MemTracker()
    tracker.track_external(model, learner, x)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert predicted == peak["Total"]


@pytest.mark.parametrize("gradients", ["fresh", "accumulated", "stepped"])
def test_a_model_is_predicted_in_the_loop_of_a_plan(gradients: str) -> None:
    model, x = Stack(2), rows(64)
    learner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"optimizer": learner, "gradients": gradients}
    predicted = vramx.predict(model, x, device="cpu", policies="live", **options).peak_bytes()
    plan = vramx.plan(model, x, levels=("left",), **options)
    # A plan counts neither the batch nor what the loop holds of a step while it ends.
    assert abs(predicted - x.nbytes - plan.measured_bytes) <= 0.03 * plan.measured_bytes


# -- On a GPU that is not there --------------------------------------------------------------------


def test_a_model_of_the_meta_device_is_predicted_as_one_with_data() -> None:
    def predicted(model: nn.Module) -> dict[str, int]:
        learner = torch.optim.AdamW(model.parameters())
        return dict(vramx.predict(model, rows(64), optimizer=learner).row().peak_bytes)

    with torch.device("meta"):
        empty = Stack(2)
    assert predicted(empty) == predicted(Stack(2))


def test_parameters_gradients_states_and_the_batch_add_up() -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.zeros(4, 256)
    learner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prediction = vramx.predict(model, x, optimizer=learner)
    matrix = 256 * 256 * 4
    # The gradient of the output, and of the loss a number or two.
    assert 0 <= prediction.peak_bytes() - 3 * matrix - 2 * x.nbytes <= 4 * x.nbytes
    assert prediction.row().before_bytes == matrix + x.nbytes


def test_autocast_casts_as_on_a_gpu() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.zeros(1024, 64)
    held = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        held.append((y.dtype, model[0](x).dtype, y.device.type))
        assert y.dtype == torch.float32  # of a norm, on a GPU
        with torch.autocast("cuda", torch.bfloat16):
            assert model[0](x).dtype == torch.bfloat16
        y.sum().backward()

    vramx.predict(step, policies="live")
    assert held == []  # it was a copy that held something


def attending(x: Tensor, mask: Tensor | None = None) -> None:
    y = nn.functional.scaled_dot_product_attention(x, x, x, mask)
    y.float().sum().backward()


@pytest.mark.parametrize("masked", [False, True], ids=["flash", "efficient"])
def test_attention_makes_no_scores(masked: bool) -> None:
    tokens = 2048
    x = torch.zeros(1, 4, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool) if masked else None
    scores = 4 * tokens * tokens * x.itemsize
    masks = 0 if mask is None else 3 * mask.numel() * x.itemsize  # itself, and what is added
    assert vramx.predict(attending, x, mask).peak_bytes() < scores + masks


def test_dropout_keeps_a_byte_an_element() -> None:
    x = torch.zeros(1 << 20, requires_grad=True)

    def step() -> Tensor:
        return nn.functional.dropout(x, 0.5)

    result_and_mask = x.nbytes + x.numel()
    assert vramx.predict(step, steps=1).peak_bytes() == x.nbytes + result_and_mask


def test_a_checkpoint_under_autocast_is_computed_again_as_it_was() -> None:
    def peak(model: nn.Module) -> int:
        x = rows(4096)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().mean()
            loss.backward()

        return vramx.predict(step, policies="live").peak_bytes()

    assert peak(Checkpointed(4)) < peak(Stack(4)) * 0.6


def test_accumulation_holds_gradients_beside_activations() -> None:
    model, x = Stack(2), rows(2048)

    def step(times: int) -> None:
        for _ in range(times):
            model(x).mean().backward()
        model.zero_grad()

    once, twice = (vramx.predict(step, n, steps=1).peak_bytes() for n in (1, 2))
    gradients = sum(p.nbytes for p in model.parameters())
    assert 0 < twice - once <= gradients


def test_the_second_step_is_in_a_prediction() -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.zeros(2048, 256)
    learner = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        learner.step()
        learner.zero_grad()

    first, both = (vramx.predict(step, steps=n).peak_bytes() for n in (1, 2))
    assert both - first == 2 * 256 * 256 * 4


def test_a_peak_has_its_place() -> None:
    wide = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8)))
    row = vramx.predict(wide, torch.zeros(4096, 8)).row()
    assert row.phase in (FORWARD, BACKWARD)
    assert row.module.startswith("1")
    learner = torch.optim.AdamW(wide.parameters())
    assert vramx.predict(wide, torch.zeros(1, 8), optimizer=learner).row().phase == OPTIMIZER


def test_policies_are_replayed() -> None:
    peaks = vramx.predict(Stack(2), rows(4096)).row().peak_bytes
    assert list(peaks) == ["live", "native", "expandable", "vramx"]
    assert all(peaks["live"] <= peaks[policy] for policy in peaks)


def test_what_is_beside_a_peak_is_not_in_it() -> None:
    prediction = vramx.predict(Stack(2), rows(64))
    assert sum(prediction.beside.values()) == 2 * CUBLAS_BYTES + CONTEXT_BYTES
    assert prediction.needed_bytes("live") == prediction.peak_bytes() + 2 * CUBLAS_BYTES + (
        CONTEXT_BYTES
    )
    assert prediction.peak_bytes() < CUBLAS_BYTES


# -- Levels ----------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def test_a_level_keeps_what_its_codec_says() -> None:
    model, x = nn.Sequential(*(Wide() for _ in range(4))), torch.zeros(8192, 64)
    kept = []

    def step() -> None:
        kept.append(model(x))

    # After forward; of a level with none of the temporaries of the last block.
    prediction = vramx.predict(step, levels=("left", "int8", "int4"), steps=1)
    exact = prediction.peak_bytes(level="left")
    for level, bits in (("int8", 8), ("int4", 4)):
        # Of a block gelu keeps its input and down its own; up keeps the block's input.
        packed = bytes_of(8192 * 1024, Format(bits)) * 2 + bytes_of(8192 * 64, Format(bits))
        saved = 4 * ((8192 * 1024 * 2 + 8192 * 64) * 4 - packed)
        largest = 2 * 8192 * 1024 * 4  # the temporaries of a block while they are packed
        assert abs(exact - prediction.peak_bytes(level=level) - saved) <= largest


def layers() -> nn.Module:
    made = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3))
    return nn.Sequential(*made)


@pytest.mark.parametrize("level", ["left", "keep", "int8", "recompute_mlp", "recompute_all"])
def test_levels_of_known_blocks_are_predicted_as_they_run(level: str) -> None:
    model, x = layers(), torch.zeros(8, 32, 64)

    def forward(model: nn.Module) -> Tensor:
        return model(x).sum()

    options = {"levels": (level,), "device": "cpu", "policies": "live", "steps": 1}
    predicted = vramx.predict(forward, model, **options)
    vramx.optimize(model, level)
    meter = HostMeter(model, [x])
    with meter.watching():
        loss = forward(model)
    assert predicted.peak_bytes() == meter.peak_bytes()
    assert loss.requires_grad


def test_a_level_that_no_block_has_is_a_row_that_says_so() -> None:
    prediction = vramx.predict(Stack(2), rows(64), levels=("left", "keep"))
    assert prediction.row("left").why_not is None
    assert "level 'keep'" in str(prediction)
    with pytest.raises(InvalidValueError, match="level 'keep' has no prediction"):
        prediction.peak_bytes(level="keep")


# -- What is followed, and what is left as it was --------------------------------------------------


class Trainer:
    def __init__(self) -> None:
        self.model = Stack(2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batches = [rows(64)]

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).mean()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.loss(self.batches[0]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


SHARED = Trainer()


def step_of_the_module() -> None:
    helped()


def helped() -> None:
    SHARED.step()


def test_a_step_is_followed_wherever_its_model_is() -> None:
    trainer = Trainer()

    def closure() -> None:
        trainer.step()

    def argument(model: nn.Module, x: Tensor, learner: Any = trainer.optimizer) -> None:
        model(x).mean().backward()
        learner.step()
        learner.zero_grad()

    programs: list[Any] = [
        trainer.step,
        closure,
        step_of_the_module,
        functools.partial(trainer.step, times=1),
        functools.partial(argument, trainer.model, trainer.batches[0]),
    ]
    peaks = {vramx.predict(program).peak_bytes() for program in programs}
    peaks.add(vramx.predict(argument, trainer.model, trainer.batches[0]).peak_bytes())
    assert len(peaks) == 1


def test_nothing_is_changed() -> None:
    trainer = Trainer()
    trainer.model.eval()
    available, backward = torch.cuda.is_available, torch.autograd._engine_run_backward
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    generator = torch.get_rng_state()
    vramx.predict(trainer.step, levels=("left", "int8", "recompute_all"))
    assert all(map(torch.equal, trainer.model.parameters(), weights))
    assert all(p.grad is None and type(p) is nn.Parameter for p in trainer.model.parameters())
    assert not trainer.optimizer.state
    assert not trainer.model.training
    assert "no module" in str(vramx.report(trainer.model)) or not vramx.report(trainer.model).rows
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.cuda.is_available is available
    assert torch.autograd._engine_run_backward is backward
    trainer.step()  # real tensors go on
    assert trainer.optimizer.state


def test_states_that_exist_are_counted() -> None:
    trainer = Trainer()
    new = vramx.predict(trainer.step, steps=1)
    trainer.step()
    begun = vramx.predict(trainer.step, steps=1)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    assert begun.row().before_bytes - new.row().before_bytes == 2 * weights


# -- What cannot be known --------------------------------------------------------------------------


@torch.library.custom_op("vramx_tests::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x.clone()


def reads_a_size(x: Tensor) -> Tensor:
    return x[: int(x.argmax().item())]


def counts(x: Tensor) -> Tensor:
    return torch.bincount(x.long())


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (reads_a_size, r"reads a value of int64 .*\(test_predict.py:\d+\)"),
        (counts, "aten.bincount.*cannot run without data"),
        (no_fake, "vramx_tests::no_fake"),
        (lambda x: x @ x[:3], "the step fails without data"),
    ],
)
def test_what_needs_data_is_one_error_that_names_it(step: Any, said: str) -> None:
    with pytest.raises(UntraceableError, match=said):
        vramx.predict(step, torch.zeros(4, 4))


def test_what_a_step_makes_on_the_host_is_told_of() -> None:
    layer = nn.Linear(64, 64)
    with pytest.raises(UntraceableError, match="make it before the step, or on the device of"):
        vramx.predict(lambda: layer(torch.ones(4, 64)), policies="live")


def test_what_a_step_makes_on_the_gpu_needs_none() -> None:
    layer = nn.Linear(64, 64, bias=False)

    def step() -> None:
        layer(torch.tensor([[1.0] * 64] * 128, device="cuda")).sum().backward()

    # In forward: the weight, the batch, the result and its sum.
    expected = 64 * 64 * 4 + 2 * 128 * 64 * 4 + 4
    assert vramx.predict(step, policies="live", steps=1).peak_bytes() == expected


def test_a_step_may_ask_what_the_gpu_is() -> None:
    layer = nn.Linear(64, 64)

    def step() -> None:
        gpu = torch.cuda.get_device_properties(0)
        assert (gpu.major, gpu.minor) == torch.cuda.get_device_capability()
        assert gpu.name == torch.cuda.get_device_name() == "NVIDIA H100"
        free, total = torch.cuda.mem_get_info()
        assert free == total == gpu.total_memory
        layer(torch.ones(gpu.multi_processor_count, 64, device="cuda"))

    assert vramx.predict(step, policies="live").peak_bytes() > 132 * 64 * 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x)).sum()


def test_tied_weights_that_are_moved_stay_tied() -> None:
    def step() -> None:
        model = Tied().to("cuda").bfloat16()
        assert model.head.weight is model.words.weight
        assert len(list(model.parameters())) == 1
        model(torch.zeros(8, dtype=torch.long, device="cuda")).backward()

    vramx.predict(step, policies="live", steps=1)


def test_a_read_float_is_assumed() -> None:
    model = Stack(1)

    def step() -> float:
        return model(rows(4).to("cuda")).sum().item()

    assert "0.0" in vramx.predict(step).assumptions[0]


def test_a_mask_selects_all_at_most() -> None:
    x = torch.zeros(1 << 16, requires_grad=True)
    prediction = vramx.predict(lambda: x[x > 0].sum().backward(), steps=1)
    assert any("mask" in each for each in prediction.assumptions)
    assert prediction.peak_bytes() >= 2 * x.nbytes


def test_bins_are_as_many_as_are_asked_for() -> None:
    values = torch.zeros(8, dtype=torch.int64)
    nodes = torch.zeros(1 << 16, requires_grad=True)

    def step() -> None:
        degree = torch.bincount(values, minlength=len(nodes))
        assert degree.dtype is torch.int64
        (nodes * degree).sum().backward()

    prediction = vramx.predict(step, steps=1)
    assert any("minlength" in each for each in prediction.assumptions)
    # Nodes, bins of eight bytes, which backward keeps, and a gradient.
    assert prediction.peak_bytes() >= nodes.nbytes + 8 * len(nodes) + nodes.nbytes


@pytest.mark.parametrize(
    ("dtype", "counted"), [(torch.float32, torch.float32), (torch.int32, torch.float64)]
)
def test_bins_of_weights_are_of_the_type_that_torch_has(
    dtype: torch.dtype, counted: torch.dtype
) -> None:
    values, weights = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=dtype)
    assert torch.bincount(values, weights, 16).dtype is counted

    def step() -> None:
        found = torch.bincount(values, weights, 16)
        assert (found.dtype, found.shape) == (counted, (16,))

    vramx.predict(step, steps=1)


def test_no_kernel_is_launched_on_tensors_without_data() -> None:
    q, k = (torch.randn(2, 4, 16, 32, requires_grad=True) for _ in "qk")
    angles = torch.randn(16, 32)

    def step() -> None:
        turned = rotary(q, k, angles.cos(), angles.sin())
        sum(each.sum() for each in turned).backward()

    # Turned q and k beside them, at least.
    assert vramx.predict(step).peak_bytes() >= 4 * q.nbytes


def test_a_scaler_is_followed() -> None:
    model, x = Stack(1), rows(64)
    learner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step() -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(learner)
        scaler.update()

    assert vramx.predict(step).peak_bytes() > sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((3,), {}, "step 3 is not accepted"),
        ((nn.Linear(2, 2),), {}, "followed by one sample"),
        ((nn.Linear(2, 2), 3), {}, "sample 3 is not accepted"),
        ((reads_a_size,), {"optimizer": 3}, "optimizer is for a model"),
        ((nn.Linear(2, 2), torch.ones(2)), {"device": "tpu"}, "device 'tpu' is not accepted"),
        ((nn.Linear(2, 2), torch.ones(2)), {"levels": ["int5"]}, "level 'int5' is not accepted"),
        ((nn.Linear(2, 2), torch.ones(2)), {"policies": "best"}, "policy 'best' is unknown"),
        ((nn.Linear(2, 2), torch.ones(2)), {"steps": 0}, "steps 0 is not accepted"),
        ((nn.Linear(2, 2), torch.ones(2)), {"gradients": "gone"}, "gradients 'gone'"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: Any, options: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        vramx.predict(*arguments, **options)


def test_the_text_and_the_json_have_every_row() -> None:
    prediction = vramx.predict(Stack(2), rows(64), levels=("left", "int8"), policies="live")
    assert str(prediction).splitlines()[0].split()[:2] == ["level", "live"]
    found = json.loads(prediction.to_json())
    assert [row["level"] for row in found["rows"]] == ["left", "int8"]
    assert found["rows"][0]["peak_bytes"] == {"live": prediction.peak_bytes()}


# -- Programs of other kinds -----------------------------------------------------------------------

LAYER = nn.Linear(8, 8)
ATTENTION = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
BAG = nn.EmbeddingBag(100, 16, sparse=True)
SPARSE = torch.optim.SparseAdam(BAG.parameters())
FUSED = torch.optim.Adam(LAYER.parameters(), fused=True, lr=torch.tensor(0.1))
COMPILED = torch.compile(LAYER)


def _inputs(*shape: int) -> Tensor:
    return torch.zeros(shape or (4, 8), device="cuda", requires_grad=True)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.exp()


def sparse() -> None:
    BAG(torch.zeros(4, 3, dtype=torch.int64, device="cuda")).sum().backward()
    SPARSE.step()
    SPARSE.zero_grad()


def fused() -> None:
    LAYER(_inputs()).sum().backward()
    nn.utils.clip_grad_norm_(LAYER.parameters(), 1.0)
    FUSED.step()


def compiled() -> None:
    COMPILED(_inputs()).sum().backward()


def twice_differentiated() -> None:
    x = _inputs()
    (gradient,) = torch.autograd.grad(LAYER(x).pow(2).sum(), x, create_graph=True)
    gradient.sum().backward()


def own_function() -> None:
    Exponential.apply(LAYER(_inputs())).sum().backward()


def attention_module() -> None:
    x = _inputs(2, 16, 32)
    ATTENTION(x, x, x, need_weights=False)[0].sum().backward()


def streams_and_events() -> None:
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        LAYER(torch.zeros(4, 8).pin_memory().cuda(non_blocking=True)).sum().backward()
    torch.cuda.synchronize()


def compressed_by_hand() -> None:
    with vramx.compress("int8", min_bytes=0):
        y = LAYER(LAYER(_inputs()).relu())
    y.sum().backward()


def checkpointed_by_hand() -> None:
    vramx.checkpoint(LAYER, _inputs(), level="int8").sum().backward()


def reentrant() -> None:
    checkpoint(LAYER, _inputs(), use_reentrant=True).sum().backward()


OTHERS = (
    *(sparse, fused, compiled, twice_differentiated, own_function, attention_module),
    *(streams_and_events, compressed_by_hand, checkpointed_by_hand, reentrant),
)


@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.__name__)
def test_programs_of_other_kinds_are_followed(step: Any) -> None:
    try:
        row = vramx.predict(step, policies="live").row()
    except UntraceableError as error:
        if torch.__version__ >= "2.9" or "no fake kernel" not in str(error):
            raise
        pytest.skip(f"this torch cannot without data: {error}")
    assert row.peak_bytes["live"] > row.before_bytes > 0
    assert all(p.grad is None for p in (*LAYER.parameters(), *BAG.parameters()))
