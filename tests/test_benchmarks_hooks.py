"""The benchmark of the host time of hooks: what it runs, and that hooks pack in it."""

from __future__ import annotations

import torch

from benchmarks import hooks
from benchmarks.harness import Options
from vramx.compression.codec import codec

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
