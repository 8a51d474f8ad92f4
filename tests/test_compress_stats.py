"""Counts of a compression: every tensor once, from any thread, whenever they are read."""

from __future__ import annotations

import pickle
import threading

import pytest

from vramx.compression import stats as stats_module
from vramx.compression.stats import CompressionStats

THREADS, RECORDS = 4, 3000


def recorded() -> CompressionStats:
    stats = CompressionStats()
    stats.record("linear", "", 200, 100)
    stats.record("linear", "", 200, 100)
    stats.record("gelu", "small", 8, 8)
    stats.record("linear", "parameter", 64, 64)
    stats.record("linear", "", 0, 0, shared_bytes=200)
    return stats


def test_no_count_of_any_thread_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread reads, with a sum every few records."""
    monkeypatch.setattr(stats_module, "_MOST_NOTES", 7)
    stats = CompressionStats()
    done = threading.Event()

    def record() -> None:
        for _ in range(RECORDS):
            stats.record("linear", "", 2, 1)

    def read() -> None:
        while not done.is_set():
            assert stats.saved_bytes % 2 == 0

    reader = threading.Thread(target=read)
    threads = [threading.Thread(target=record) for _ in range(THREADS)]
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert stats.tensors == THREADS * RECORDS


def test_notes_are_bounded() -> None:
    stats = CompressionStats()
    for _ in range(2 * stats_module._MOST_NOTES):
        stats.record("linear", "", 2, 1)
        assert len(stats._notes) < stats_module._MOST_NOTES


def test_counts_are_equal_travel_by_pickle_and_are_reset_with_what_was_not_yet_summed() -> None:
    stats = recorded()
    assert pickle.loads(pickle.dumps(stats)) == recorded()
    stats.record("linear", "", 1, 1)
    assert stats != recorded()
    stats.reset()
    assert stats == CompressionStats()
