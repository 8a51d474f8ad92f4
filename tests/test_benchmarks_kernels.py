"""The benchmarks of kernels, whose arithmetic needs no GPU, and of the host time of hooks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks import hooks, kernels  # noqa: E402
from benchmarks.harness import Options, UnavailableError  # noqa: E402
from benchmarks.programs import _fused_kernels  # noqa: E402
from vramx.compression.codec import codec  # noqa: E402
from vramx.sizes import GIB, MIB  # noqa: E402


def subject_of(bytes_moved: int) -> kernels.Subject:
    return kernels.rotated(lambda: lambda: None, bytes_moved)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="GPU"):
        kernels.cases(Options())


@pytest.mark.parametrize("size", [96 * MIB, 100 * MIB, 6 * GIB])
def test_a_graph_calls_each_tensor_equally_often(size: int) -> None:
    subject = subject_of(size)
    assert kernels.launches(subject) % len(subject.calls) == 0
    assert kernels.launches(subject) * size >= 4 * GIB


def test_turns_alternate_and_the_first_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def replay(size: int) -> float:
        order.append(size)
        return float(len(order))

    monkeypatch.setattr(kernels, "captured", lambda subject: subject.bytes_moved)
    monkeypatch.setattr(kernels, "replay_ms", replay)
    found = kernels.in_turn([subject_of(GIB), subject_of(2 * GIB), subject_of(3 * GIB)], repeats=2)
    assert order == [GIB, 2 * GIB, 3 * GIB] * 4
    assert found == [[7.0, 10.0], [8.0, 11.0], [9.0, 12.0]]


@pytest.mark.parametrize(("slow", "fast"), [("copy_", "neg"), ("neg", "copy_")])
def test_share_is_of_the_faster_baseline_and_says_which(slow: str, fast: str) -> None:
    rows = kernels.rows("ours", 4 * 10**9, [2.0, 4.0], {slow: [3.0, 3.0], fast: [1.0, 1.0]})
    assert {row.metric: row.values for row in rows} == {
        "ours": [2000.0, 1000.0],
        f"ours {slow}": [4e9 / 3 / 1e6, 4e9 / 3 / 1e6],
        f"ours {fast}": [4000.0, 4000.0],
        f"ours share of {fast}": [0.5, 0.25],
    }


@pytest.mark.parametrize(("bits", "per_element"), [(8, 1 + 6 / 128), (4, 0.5 + 4 / 64)])
def test_layouts_are_the_default_formats(bits: int, per_element: float) -> None:
    layout = kernels.default_layout(64 * MIB, bits)
    assert layout.numel == 32 * MIB
    assert layout.buffer_bytes == per_element * layout.numel


PACK = 1 + 6 / 128  # bytes of an element in 8 bits with a scale and two outliers a group
FACTOR = 4 / 4096  # of a row


@pytest.mark.parametrize(
    ("name", "per_element"),
    [
        ("norm_forward8", 2 + 2 + PACK + FACTOR),
        ("norm_forward8_residual", 4 + 4 + PACK + FACTOR),
        ("norm_backward8", 2 + PACK + FACTOR + 2),
        ("norm_backward8_residual", 4 + PACK + FACTOR + 2),
        ("norm_output8", PACK + 2),
        ("swiglu_forward8", 4 + 2 + 2 * PACK),
        ("swiglu_backward8", 2 + 2 * PACK + 6),
        ("gelu_forward8", 2 + 2 + PACK),
        ("gelu_backward8", 2 + PACK + 4),
        ("dropout_add", 4 + 2),
        ("rotary", 2 + 2),
    ],
)
def test_a_fused_kernel_is_measured_by_what_it_must_move(name: str, per_element: float) -> None:
    launch = _fused_kernels.MAKERS[name](GIB, "meta")
    assert launch.bytes_moved == per_element * (GIB // 2)


def test_the_loss_is_measured_by_one_reading_and_one_writing_of_whole_rows() -> None:
    launch = _fused_kernels.MAKERS["cross_entropy"](GIB, "meta")
    (logits,) = launch.written
    assert logits.shape[1] == _fused_kernels.CLASSES
    assert launch.bytes_moved == 2 * logits.nbytes <= 2 * GIB


def test_fused_kernels_are_measured_up_to_one_gibibyte() -> None:
    assert set(kernels.subjects("1GiB")) == set(kernels.codec_subjects()) | set(
        _fused_kernels.MAKERS
    )
    assert set(kernels.subjects("4GiB")) == set(kernels.codec_subjects())


# --- hooks ----------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def test_every_case_has_an_operation_of_which_hooks_pack_something() -> None:
    subjects = hooks.subjects(CPU)
    assert hooks.cases(Options()) == list(subjects)
    with hooks.kernels_left_out():
        assert all(hooks.tensors_packed(subject, CPU) >= 1 for subject in subjects.values())


def test_a_case_has_a_time_of_packing_and_of_unpacking() -> None:
    pack, unpack, packed = hooks.measure("gelu", Options(quick=True))
    assert (pack.metric, unpack.metric) == ("host_pack_us", "host_unpack_us")
    assert len(pack.values) == len(unpack.values) == 5
    assert packed.values == [1.0]


def test_kernels_are_back_afterwards() -> None:
    before = codec._launch
    with hooks.kernels_left_out():
        assert codec._launch(CPU) is not None
    assert codec._launch is before
