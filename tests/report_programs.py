"""Programs after public reports: losses, layers and regions of kinds that the fuzz does not draw.

Each is a region with modules a, b, ... that takes (2, 16, 64) and gives anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

Forward = Callable[[Any, Tensor], Tensor]
PROGRAMS: dict[str, tuple[tuple[Callable[[], Any], ...], Forward]] = {}


def program(*modules: Callable[[], Any]) -> Callable[[Forward], Forward]:
    """Add a program, whose modules these make."""

    def add(forward: Forward) -> Forward:
        PROGRAMS[forward.__name__] = modules, forward
        return forward

    return add


def linear(width: int = 64, inputs: int = 64) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, width)


def seeded(*shape: int) -> Tensor:
    """Return numbers that are the same in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def edges() -> Tensor:
    return torch.randint(0, 32, (2, 200), generator=torch.Generator().manual_seed(0))


@program(linear(8), linear(1))
def ppo(m: Any, h: Tensor) -> Tensor:
    p = Categorical(logits=m.a(h) * 3)
    act = h.detach()[..., :8].argmax(-1)
    adv = h.detach().mean(-1) * 5
    logp = p.log_prob(act)
    ratio = (logp - logp.detach() + 0.3 * h.detach()[..., 0]).exp()
    v = m.b(h).squeeze(-1)
    old = v.detach() + 0.1 * h.detach()[..., 1]
    clipped = old + (v - old).clamp(-0.2, 0.2)
    return (
        -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        - 0.01 * p.entropy()
        + torch.max((v - adv) ** 2, (clipped - adv) ** 2)
    )


@program(linear(), linear())
def infonce(m: Any, h: Tensor) -> Tensor:
    q = F.normalize(m.a(h).flatten(0, 1), dim=-1)
    k = F.normalize(m.b(h).flatten(0, 1).tanh(), dim=-1)
    return F.cross_entropy(q @ k.T / 0.02, torch.arange(len(q)))


@program(linear(4))
def giou(m: Any, h: Tensor) -> Tensor:
    b = m.a(h)
    b1 = torch.cat([b[..., :2], b[..., :2] + b[..., 2:].exp()], -1)
    b2 = b1.detach().roll(1, 1) + 0.1
    lt, rb = torch.max(b1[..., :2], b2[..., :2]), torch.min(b1[..., 2:], b2[..., 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]

    def area(q):
        return (q[..., 2] - q[..., 0]) * (q[..., 3] - q[..., 1])

    union = area(b1) + area(b2) - inter
    c = (
        (torch.max(b1[..., 2:], b2[..., 2:]) - torch.min(b1[..., :2], b2[..., :2]))
        .clamp(min=0)
        .prod(-1)
    )
    return 1 - inter / (union + 1e-6) + (c - union) / (c + 1e-6)


@program(linear(3))
def quantile(m: Any, h: Tensor) -> Tensor:
    q = torch.tensor([0.1, 0.5, 0.9])
    e = h.detach()[..., :1] * 2 - m.a(h)
    return torch.max(q * e, (q - 1) * e)


@program(linear(), lambda: nn.Parameter(torch.randn(20, 64)))
def arcface(m: Any, h: Tensor) -> Tensor:
    c = (
        F.linear(F.normalize(m.a(h).flatten(0, 1)), F.normalize(m.b))
        .float()
        .clamp(-1 + 1e-7, 1 - 1e-7)
    )
    t = torch.arange(32) % 20
    m = torch.cos(c.acos() + 0.5)
    o = F.one_hot(t, 20).float()
    return F.cross_entropy(64 * (o * m + (1 - o) * c), t, reduction="none")


@program(lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 40, [10, 20], div_value=2.0))
def adaptive_softmax(m: Any, h: Tensor) -> Tensor:
    return m.a(h.flatten(0, 1), torch.arange(32)).output


@program(lambda: nn.LSTM(64, 32, batch_first=True, bidirectional=True), linear(12))
def ctc(m: Any, h: Tensor) -> Tensor:
    lp = (m.b(m.a(h)[0]) * 3).log_softmax(-1).transpose(0, 1).float()
    return F.ctc_loss(
        lp,
        torch.tensor([[1, 2, 3, 3], [4, 5, 6, 7]]),
        torch.tensor([16, 14]),
        torch.tensor([4, 3]),
        reduction="none",
    )


@program(linear(), linear())
def cdist_triplet(m: Any, h: Tensor) -> Tensor:
    a, b = m.a(h).flatten(0, 1).float(), m.b(h).flatten(0, 1).float()
    return (
        torch.cdist(a, b).mean(1)
        + F.triplet_margin_loss(a, b, a.flip(0), reduction="none")
        + F.pairwise_distance(a, b, p=3)
        + F.cosine_embedding_loss(a, b, torch.ones(32), reduction="none")
    )


@program(
    lambda: nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64, bias=False)
    ),
    lambda: nn.BatchNorm1d(64, affine=False),
)
def barlow_bn(m: Any, h: Tensor) -> Tensor:
    a, b = m.b(m.a(h.flatten(0, 1))), m.b(m.a(h.flatten(0, 1).flip(0) * 1.1))
    c = a.T @ b / 32
    return (c - torch.eye(64)).square()


@program(linear(), linear(64, 32))
def vae(m: Any, h: Tensor) -> Tensor:
    mu, lv = m.a(h).chunk(2, -1)
    lv = lv * 4
    z = mu + seeded(*mu.shape).to(mu) * (0.5 * lv).exp()
    return F.mse_loss(m.b(z), h.detach(), reduction="none").sum(-1) - 0.5 * (
        1 + lv - mu**2 - lv.exp()
    ).sum(-1)


@program(linear(15))
def mdn(m: Any, h: Tensor) -> Tensor:
    pi, mu, s = m.a(h).chunk(3, -1)
    s = F.softplus(s) + 1e-3
    y = h.detach()[..., :1] * 4
    return -torch.logsumexp(pi.log_softmax(-1) - 0.5 * ((y - mu) / s) ** 2 - s.log(), -1)


@program(linear(16))
def sac(m: Any, h: Tensor) -> Tensor:
    mu, ls = m.a(h).chunk(2, -1)
    d = Normal(mu, ls.clamp(-5, 2).exp())
    torch.manual_seed(3)
    u = d.rsample() * 3
    return d.log_prob(u) - (1 - u.tanh() ** 2 + 1e-6).log()


@program(
    lambda: nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64)),
    lambda: nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64)),
    lambda: nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64)),
)
def realnvp(m: Any, h: Tensor) -> Tensor:
    det = 0
    for net in (m.a, m.b, m.c):
        one, two = h.chunk(2, -1)
        s, t = net(one).chunk(2, -1)
        s = 2 * (s / 2).tanh()
        two = two * s.exp() + t
        det = det + s.sum(-1)
        h = torch.cat([two, one], -1)
    return -0.5 * h.square().sum(-1) + det


@program(lambda: nn.Linear(64, 64 * 5))
def flow_spline(m: Any, h: Tensor) -> Tensor:
    w = m.a(h).unflatten(-1, (64, 5)).softmax(-1).cumsum(-1)
    x = h.sigmoid()
    i = torch.searchsorted(w.detach().contiguous(), x.detach().unsqueeze(-1).contiguous()).clamp(
        max=4
    )
    hi = w.gather(-1, i).squeeze(-1)
    lo = F.pad(w, (1, 0)).gather(-1, i).squeeze(-1)
    return (x - lo) / (hi - lo) + (hi - lo).log()


@program(lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))
def ode(m: Any, h: Tensor) -> Tensor:
    def f(y):
        return m.a(y * 2)

    for _ in range(4):
        k1 = f(h)
        k2 = f(h + 0.125 * k1)
        k3 = f(h + 0.125 * k2)
        k4 = f(h + 0.25 * k3)
        h = h + 0.25 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return h


@program(linear(), linear())
def siren(m: Any, h: Tensor) -> Tensor:
    return torch.sin(30 * m.b(torch.sin(30 * m.a(h))))


@program(linear(), linear(4, 36))
def nerf(m: Any, h: Tensor) -> Tensor:
    x = h[..., :3]
    e = torch.cat([f(2.0**k * x) for k in range(6) for f in (torch.sin, torch.cos)], -1)
    o = m.b(e)
    s = F.softplus(o[..., 0] * 3)
    alpha = 1 - (-s * 0.3).exp()
    t = torch.cumprod(torch.cat([torch.ones(2, 1).to(h), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return ((alpha * t).unsqueeze(-1) * o[..., 1:].sigmoid()).sum(1) + m.a(h).mean()


@program(linear(), lambda: nn.Parameter(torch.randn(32, 64, 3, 3) / 24))
def stylegan(m: Any, h: Tensor) -> Tensor:
    s = m.a(h.mean(1)) + 1
    w = m.b[None] * s[:, None, :, None, None]
    w = w * (w.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
    return F.conv2d(
        h.transpose(1, 2).reshape(1, 128, 4, 4), w.reshape(64, 64, 3, 3), padding=1, groups=2
    )


@program(lambda: nn.Linear(64, 64 * 8))
def hypernet(m: Any, h: Tensor) -> Tensor:
    w = m.a(h.mean(1)).view(2, 64, 8)
    h = torch.bmm(h, w).tanh()
    h = torch.stack([F.linear(h[i], w[i]) for i in range(2)])
    return h
