"""What the tests of vramx.record share: small trainings, and what they keep, counted apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vramx
from vramx.memory.holders import category_tree, holders
from vramx.memory.record import Recorder
from vramx.memory.snapshot import Snapshot

WIDTH, BATCH = 64, 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pickle"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Named(nn.Module):
    """Takes its batch by name, calls a module twice, and shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.block = Residual()
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, *, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.block(self.embed(tokens))))


def residuals() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(3)))


def convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 64, 10))


def features() -> Any:
    return (torch.randn(BATCH, WIDTH),), {}


def images() -> Any:
    return (torch.randn(BATCH, 3, 8, 8),), {}


def tokens() -> Any:
    return (), {"tokens": torch.randint(100, (4, 16))}


Make = Callable[[], nn.Module]
PROGRAMS: dict[str, tuple[Make, Callable[[], Any]]] = {
    "residuals": (residuals, features),
    "convolutions": (convolutions, images),
    "checkpointed": (Checkpointed, features),
    "named": (Named, tokens),
}


class Kept:
    """The storages that autograd saves, but for the parameters'."""

    def __init__(self, model: nn.Module) -> None:
        self._left_out = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
        self.storages: dict[int, Any] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._left_out:
            self.storages[storage.data_ptr()] = storage
        return tensor

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor):
            yield

    def bytes(self, *others: Tensor) -> int:
        """Return the bytes of the storages, and of others beside them."""
        every = dict(self.storages)
        every |= {t.untyped_storage().data_ptr(): t.untyped_storage() for t in others}
        return sum(storage.nbytes() for storage in every.values())


def recorder(
    path: Path,
    source: CpuHistory,
    model: nn.Module | None = None,
    optimizer: Any = None,
    max_entries: int = 100_000,
) -> Recorder:
    made = vramx.record(path, model, optimizer, max_entries=max_entries)
    made._source = source
    return made


class Recorded:
    """What a recording on this processor says, of a moment that is noted or of its end."""

    def __init__(self, path: Path, source: CpuHistory) -> None:
        self._path, self.source = path, source
        self._moment: int | None = None

    def now(self) -> None:
        self._moment = len(self.source.entries) - 1

    def snapshot(self) -> Snapshot:
        return Snapshot.load(self._path)

    def found(self) -> dict[str, int]:
        snapshot = self.snapshot()
        return by_category(snapshot, snapshot.end_event if self._moment is None else self._moment)

    def tree(self) -> Any:
        return category_tree(self.snapshot(), self._moment)


@contextmanager
def recording(
    path: Path, model: nn.Module | None = None, optimizer: Any = None, **options: Any
) -> Iterator[Recorded]:
    """Record; the options are the history's."""
    source = CpuHistory(**options)
    made = recorder(path, source, model, optimizer)
    del model, optimizer  # what the program lets go of is to be gone
    with made:
        yield Recorded(path, source)


def category_of(snapshot: Snapshot, size: int) -> tuple[str, str]:
    """Return the category and the label of the one allocation of a size."""
    (number,) = (snapshot.allocations.size == size).nonzero()[0]
    found = snapshot.allocations
    return snapshot.categories[found.category[number]], snapshot.labels[found.label[number]]


def states_of(optimizer: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves([dict(each) for each in optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def by_category(snapshot: Snapshot, event: int) -> dict[str, int]:
    return {each.name: each.bytes for each in holders(snapshot, event, "category")}


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages of tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def train(model: nn.Module, optimizer: Any, batch: Callable[[], Any]) -> None:
    """Train three steps."""
    for _ in range(3):
        args, kwargs = batch()
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
