"""More of report_programs.py's: scans, experts, implicit layers, queues, teachers, transducers.

A word after each says whose report or tutorial it is after.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from report_programs import linear, program, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@program(linear(96), linear(24, 32), lambda: nn.Linear(8, 32), linear(64, 32))
def selective_scan(m: Any, h: Tensor) -> Tensor:
    """mamba#885: step sizes, and norms of what is scanned with them."""
    x, z, gate = m.a(h).chunk(3, -1)
    size, b, c = m.b(F.silu(x)).chunk(3, -1)
    size, b, c = F.softplus(m.c(size)), F.rms_norm(b, (8,)), F.rms_norm(c, (8,))
    rates = -torch.arange(1.0, 9.0).to(h)
    state, results = h.new_zeros(len(h), 32, 8), []
    for t in range(h.shape[1]):
        decay = (size[:, t, :, None] * rates).exp()
        state = decay * state + (size[:, t] * x[:, t])[..., None] * b[:, t, None]
        results.append((state * c[:, t, None]).sum(-1))
    return m.d((torch.stack(results, 1) + z) * F.silu(gate))


@program(linear(8), lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(8)))
def capacity_experts(m: Any, h: Tensor) -> Tensor:
    """megablocks, tutel: two experts a token, a capacity, and a loss that spreads the load."""
    tokens = h.flatten(0, 1)
    chances = m.a(tokens).softmax(-1)
    weights, chosen = chances.topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros_like(tokens)
    for number, expert in enumerate(m.b):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        rows, places = rows[:6], places[:6]
        made = F.gelu(expert(tokens[rows])) * weights[rows, places, None]
        result = result.index_add(0, rows, made.to(result.dtype))
    load = F.one_hot(chosen[:, 0], 8).to(h).mean(0)
    return result + 8 * (load * chances.mean(0)).sum()


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return (self.inner(z) + self.outer(x)).tanh()


@program(Solver)
def equilibrium(m: Any, h: Tensor) -> Tensor:
    """deq#11: backward solves for the gradient, in a hook, with a graph of its own."""
    with torch.no_grad():
        z = torch.zeros_like(h)
        for _ in range(12):
            z = m.a(z, h)
    z = m.a(z, h)
    if not z.requires_grad:
        return z
    start = z.detach().requires_grad_()
    again = m.a(start, h)

    def solve(gradient: Tensor) -> Tensor:
        found = gradient
        for _ in range(12):
            found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
        return found

    z.register_hook(solve)
    return z


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 32)
        self.key = copy.deepcopy(self.query).requires_grad_(requires_grad=False)
        self.register_buffer("keys", F.normalize(torch.randn(32, 64), dim=0))


@program(Queue)
def contrast_with_a_queue(m: Any, h: Tensor) -> Tensor:
    """moco#24: keys of earlier batches, which the next ones overwrite after they were used."""
    q = F.normalize(m.a.query(h[:, 0]), dim=-1)
    with torch.no_grad():
        for slow, fast in zip(m.a.key.parameters(), m.a.query.parameters(), strict=True):
            slow.mul_(0.99).add_(fast, alpha=0.01)
        k = F.normalize(m.a.key(h[:, 1]), dim=-1)
    near = (q * k).sum(-1, keepdim=True)
    logits = torch.cat([near, q @ m.a.keys.clone().detach().to(q)], 1) / 0.07
    with torch.no_grad():
        m.a.keys[:, :2] = k.T
    return F.cross_entropy(logits, torch.zeros(len(h), dtype=torch.long), reduction="none")


@program(linear(), linear())
def mean_teacher(m: Any, h: Tensor) -> Tensor:
    """A teacher that follows within the step, and sharp targets (dino)."""
    with torch.no_grad():
        teacher = copy.deepcopy(m.a)
        for slow, fast in zip(teacher.parameters(), m.b.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        target = (teacher(h) / 0.04).softmax(-1)
    return -(target * (m.b(m.a(h)) / 0.1).log_softmax(-1)).sum(-1)


@program(linear(32), lambda: nn.Embedding(12, 32), linear(12, 32))
def transducer(m: Any, h: Tensor) -> Tensor:
    """warp-transducer: sums over alignments in logarithms, row by row."""
    labels = torch.tensor([[1, 5, 2, 2], [3, 4, 4, 7]])
    joint = (m.a(h)[:, :, None] + m.b(F.pad(labels, (1, 0)))[:, None]).tanh()
    scores = (m.c(joint) * 3).log_softmax(-1).float()
    blank, rows = scores[..., 0], [scores.new_zeros(2, 1)]
    emit = scores[:, :, :-1].gather(-1, labels[:, None, :, None].expand(2, 16, 4, 1)).squeeze(-1)
    for u in range(4):
        rows.append(rows[-1] + emit[:, 0, u, None])
    before = torch.cat(rows, 1)
    for t in range(1, 16):
        row = [before[:, :1] + blank[:, t - 1, :1]]
        for u in range(1, 5):
            stay = before[:, u, None] + blank[:, t - 1, u, None]
            row.append(torch.logaddexp(stay, row[-1] + emit[:, t, u - 1, None]))
        before = torch.cat(row, 1)
    return -(before[:, -1] + blank[:, -1, -1])


class Adjoint(torch.autograd.Function):
    """torchdiffeq: forward keeps the end alone; backward goes back in time."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, h: Tensor, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(8):
                h = h + net(h) / 8
        ctx.net = net
        ctx.save_for_backward(h, *parameters)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        h, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in parameters]
        for _ in range(8):
            with torch.enable_grad():
                leaf = h.detach().requires_grad_()
                made = ctx.net(leaf) / 8
            found = torch.autograd.grad(made, (leaf, *parameters), gradient)
            h, gradient = h - made.detach(), gradient + found[0]
            sums = [a + b for a, b in zip(sums, found[1:], strict=True)]
        return None, gradient, *sums


@program(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), linear())
def adjoint(m: Any, h: Tensor) -> Tensor:
    return m.b(Adjoint.apply(m.a, h, *m.a.parameters()))


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(made)
        self.stacked = nn.ParameterDict({k.replace(".", "_"): p for k, p in stacked.items()})
        self.one = [made[0].to("meta")]  # in a list: no part of this module


@program(Ensemble)
def ensemble(m: Any, h: Tensor) -> Tensor:
    """pytorch#122729: members of an ensemble side by side, by vmap."""
    stacked = {name.replace("_", "."): p for name, p in m.a.stacked.items()}

    def one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(m.a.one[0], parameters, (x,))

    return torch.vmap(one, (0, None))(stacked, h).mean(0) ** 2


@program(
    lambda: nn.utils.parametrizations.spectral_norm(nn.Conv1d(64, 32, 3, padding=1)),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)),
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
)
def parametrized(m: Any, h: Tensor) -> Tensor:
    """pytorch#62293: power iterations move buffers in each of two passes."""
    one, two = (m.a(x.transpose(1, 2)) for x in (h, h.flip(1)))
    return m.c(m.b(F.leaky_relu(one, 0.2) - F.silu(two)))


@program(linear(), linear(), lambda: nn.InstanceNorm1d(16))
def residuals_in_place(m: Any, h: Tensor) -> Tensor:
    """pytorch#26546, pytorch#36383: a stream that is added to, and views that are overwritten."""
    h = h * 1
    h += m.a(h.detach().clone()).tanh()
    h = F.relu_(m.c(h)) + h
    half = h.view(2, 16, 2, 32)
    half[:, :, 0].mul_(0.5)
    h.add_(m.b(h.sigmoid()))
    return h[:].relu_()


@program(lambda: nn.Embedding(64, 64), linear(), linear())
def tied(m: Any, h: Tensor) -> Tensor:
    """One matrix is read as a table, as a product, and transposed, under torch's checkpoint too."""
    tokens = h.detach().argmax(-1) % 64
    h = h + m.a(tokens)
    h = h + checkpoint(lambda x: F.gelu(m.b(x)) @ m.a.weight, h, use_reentrant=False)
    return F.cross_entropy(
        (m.c(h) @ m.a.weight.T).flatten(0, 1), tokens.flatten(), reduction="none"
    )


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)


@program(Adapted, linear())
def merged_adapter(m: Any, h: Tensor) -> Tensor:
    """peft#868: an adapter that is added to the weight, beside one that is not."""
    merged = m.a.base.weight + 2 * m.a.up.weight @ m.a.down.weight
    apart = m.a.base(h) + 2 * m.a.up(F.dropout(m.a.down(h), 0.1, m.training))
    return m.b(F.silu(F.linear(h, merged, m.a.base.bias)) * apart)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


@program(linear(), linear(), linear(2))
def adversarial(m: Any, h: Tensor) -> Tensor:
    """dann: one branch gets its gradient with the other sign."""
    h = F.elu(m.a(h))
    domain = m.c(Reverse.apply(h, 0.3)).log_softmax(-1)
    return m.b(h).square().mean(-1) - domain[..., 0]


@program(linear(32), lambda: nn.Parameter(seeded(24, 32)), linear(64, 32))
def quantised_codes(m: Any, h: Tensor) -> Tensor:
    """vq-vae: the nearest code, straight through; with a soft choice beside it."""
    z = m.a(h)
    far = torch.cdist(z.flatten(0, 1), m.b).unflatten(0, z.shape[:2])
    code = m.b[far.argmin(-1)]
    through = z + (code - z).detach()
    soft = F.gumbel_softmax(-far, tau=0.5, hard=True) @ m.b
    loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
    return m.c(through + 0.1 * soft) + loss


@program(linear(), linear(8), linear(8))
def transport(m: Any, h: Tensor) -> Tensor:
    """superglue, swav: rows and columns of an exponential are scaled in turns."""
    cost = m.b(m.a(h).tanh()) @ m.c(h).transpose(1, 2) * 2
    u, v = torch.zeros_like(cost[..., 0]), torch.zeros_like(cost[:, 0])
    for _ in range(5):
        u = -(cost + v[:, None]).logsumexp(2)
        v = -(cost + u[..., None]).logsumexp(1)
    return (cost + u[..., None] + v[:, None]).exp() @ h


@program(linear(), lambda: nn.Parameter(torch.randn(5, 64, dtype=torch.cfloat) * 0.1))
def fourier_operator(m: Any, h: Tensor) -> Tensor:
    """neuraloperator: weights in frequencies, complex."""
    found = torch.fft.rfft(h.float(), dim=1)
    kept = torch.zeros_like(found)
    kept[:, :5] = found[:, :5] * m.b.to(found.dtype)
    return F.gelu(torch.fft.irfft(kept, n=16, dim=1).to(h) + m.a(h))


@program(linear(), linear(), linear())
def own_hooks(m: Any, h: Tensor) -> Tensor:
    """torchtune#1913: saved_tensors_hooks of the program's own, inside those of vramx."""
    h = F.gelu(m.a(h))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        h = h + F.silu(m.b(h)) * h
    return m.c(h.sigmoid())
