"""Batches of a DataLoader while a step is predicted: real ones are made, and fakes stand for them.

A dataset reads files and a sampler draws numbers, which cannot be done without data. So both run as
they are, in this process whatever the number of workers, and the step gets tensors without data of
their shapes. An iterator that the program holds is not advanced: the batches come from one of its
own. Once prediction is over, a generator of the program that began a loop in it goes on with real
batches. Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from vramx.planning.fake_values import real

StandIn = Callable[[Any], Any]


@contextlib.contextmanager
def loading(stand_in: StandIn) -> Iterator[None]:
    """Have loaders give what `stand_in` makes of the tensors of their batches."""
    iterate = DataLoader.__iter__
    begun: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()
    predicting = [True]

    def of_loader(self: Any) -> Iterator[Any]:
        for batch in _batches(self, self.dataset, self.collate_fn, self.drop_last):
            yield tree_map(stand_in, batch)
            if not predicting:
                break
        if not predicting:
            yield from iterate(self)

    def of_iterator(self: Any) -> Any:
        if self not in begun:
            begun[self] = _batches(self, self._dataset, self._collate_fn, self._drop_last)
        return tree_map(stand_in, next(begun[self]))

    with (
        mock.patch.object(DataLoader, "__iter__", of_loader),
        mock.patch.object(_BaseDataLoaderIter, "__next__", of_iterator),
    ):
        try:
            yield
        finally:
            predicting.clear()


def _batches(loads: Any, dataset: Any, collate: Any, drop_last: bool) -> Iterator[Any]:
    """Yield real batches of a loader or of one of its iterators, from the first on."""
    with real():
        whole = loads._auto_collation
        fetcher = _DatasetKind.create_fetcher(
            loads._dataset_kind, dataset, whole, collate, drop_last
        )
        indices = iter(loads._index_sampler)
    while True:
        with real():
            try:
                batch = fetcher.fetch(next(indices))
            except StopIteration:
                return
        yield batch
