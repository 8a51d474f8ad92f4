"""Tensors of a few KiB outlive large ones, and the program gives its cache back (pytorch#69526).

kind_tiny_survivors.py native|vramx CASE

Of each step something small stays. When the steps are over, what is reserved after empty_cache() is
to be about what is allocated, so that another process may have the rest.
"""

import random
from collections.abc import Callable, Iterator

import kind_tools
import torch
from kind_tools import MIB, Finding, block

SLACK_MIB = 64
# A case takes its steps, and returns what says whether the data of what stayed are right.
Case = Callable[[random.Random], Callable[[], bool]]


def given_back(case: Case) -> Finding:
    """Run the steps of a case, give the cache back, and look at what stayed."""
    is_right = case(random.Random(1))
    torch.cuda.synchronize()
    peak, before = torch.cuda.max_memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB
    torch.cuda.empty_cache()
    live, after = torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB
    right = is_right()
    told = (
        f"reserved {before:.0f} MiB (peak allocated {peak:.0f}), after empty_cache {after:.0f} "
        f"with {live:.1f} allocated (at most {SLACK_MIB} more); "
        f"data {'right' if right else 'WRONG'}"
    )
    return right and before > 16 * SLACK_MIB and after <= live + SLACK_MIB, told


def activations(rng: random.Random, count: int) -> Iterator[torch.Tensor]:
    """Yield tensors as a step of varying size makes them."""
    scale = rng.uniform(0.25, 1.0)
    for _ in range(count):
        yield block(int(rng.choice((4, 8, 16, 32, 64, 128, 256)) * MIB * scale))


def statistics(rng: random.Random) -> Callable[[], bool]:
    kept: list[torch.Tensor] = []
    for _ in range(60):
        step = []
        for index, each in enumerate(activations(rng, 160)):
            step.append(each)
            if index % 8 == 0:
                kept.append(block(rng.randint(512, 4096), len(kept) % 251))
        while step:
            step.pop()
    return lambda: all(bool((each == index % 251).all()) for index, each in enumerate(kept))


def metrics(rng: random.Random) -> Callable[[], bool]:
    """A loss and an accuracy of each step are kept on the device, for a log at the end."""
    kept = []
    for index in range(150):
        step = list(activations(rng, 60))
        step[-1][:1024].fill_(index)
        kept.append(step[-1][:1024].float().mean())
        kept.append((step[-1][:1024] == index).float().mean())
        del step
    return lambda: [each.item() for each in kept] == [x for i in range(150) for x in (i, 1)]


def optimizer_state(rng: random.Random) -> Callable[[], bool]:
    """Layers are unfrozen one after the other, and Adam makes a state when it first sees each."""
    adapters = [torch.nn.Parameter(torch.zeros(16, 256, device="cuda")) for _ in range(320)]
    optimizer = torch.optim.Adam(adapters, lr=0.5)
    for step in range(40):
        held = []
        for index, each in enumerate(activations(rng, 60)):
            held.append(each)
            if index % 8 == 0:
                adapters[8 * step + index // 8].grad = torch.ones(16, 256, device="cuda")
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        del held
    # The first step of Adam is the learning rate, against the gradient's sign.
    return lambda: all(bool(((each + 0.5).abs() < 1e-3).all()) for each in adapters)


def replay_buffer(rng: random.Random) -> Callable[[], bool]:
    """Of each batch of observations the drawn indices are kept."""
    kept = []
    for index in range(120):
        observations = list(activations(rng, 60))
        drawn = torch.arange(256, device="cuda") + index
        kept.append(drawn)
        observations.append(observations[0][drawn % len(observations[0])])
        del observations
    expected = torch.arange(256, device="cuda")
    return lambda: all(bool((each - i == expected).all()) for i, each in enumerate(kept))


if __name__ == "__main__":
    cases = (statistics, metrics, optimizer_state, replay_buffer)
    kind_tools.run({case.__name__: (lambda case=case: given_back(case)) for case in cases})
