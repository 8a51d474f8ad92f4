"""More of report_programs.py's: layers, products and inverses of matrices, graphs, scans."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from report_programs import edges, linear, program
from torch import Tensor, nn


@program(
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)),
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64), orthogonal_map="cayley"),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)),
)
def orthogonal(m: Any, h: Tensor) -> Tensor:
    return m.c(F.gelu(m.b(F.gelu(m.a(h)))))


@program(linear())
def newton_schulz(m: Any, h: Tensor) -> Tensor:
    g = m.a(h)
    x = g / (g.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@program(linear(), linear())
def solve(m: Any, h: Tensor) -> Tensor:
    a = m.a(h).float()
    gram = a.mT @ a / 16 + torch.eye(64)
    return torch.linalg.solve(gram, m.b(h).float().mT)


@program(linear())
def cholesky(m: Any, h: Tensor) -> Tensor:
    a = m.a(h).float()
    c = torch.linalg.cholesky(a @ a.mT / 64 + torch.eye(16))
    return (
        torch.linalg.solve_triangular(c, h.float(), upper=False)
        + torch.diagonal(c, dim1=-2, dim2=-1).log().sum(-1)[:, None, None]
    )


@program(linear())
def svd(m: Any, h: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(m.a(h).float(), full_matrices=False)
    return (u * s.sqrt().unsqueeze(-2)) @ v


@program(linear())
def eigh(m: Any, h: Tensor) -> Tensor:
    a = m.a(h).float()
    w, v = torch.linalg.eigh(a @ a.mT / 64 + torch.diag(torch.arange(16.0)))
    return (v * w.log1p().unsqueeze(-2)) @ v.mT


@program(lambda: nn.Parameter(torch.randn(5, 64, 64, dtype=torch.cfloat) / 64), linear())
def fno(m: Any, h: Tensor) -> Tensor:
    x = torch.fft.rfft(h.float(), dim=1)
    y = torch.einsum("bmi,mio->bmo", x[:, :5], m.a.to(torch.cfloat))
    y = F.pad(torch.view_as_real(y), (0, 0, 0, 0, 0, 4))
    return F.gelu(torch.fft.irfft(torch.view_as_complex(y.contiguous()), n=16, dim=1) + m.b(h))


@program(linear(), linear())
def complex_rotary(m: Any, h: Tensor) -> Tensor:
    f = torch.polar(
        torch.ones(16, 32), torch.outer(torch.arange(16.0), 1 / 100 ** torch.linspace(0, 1, 32))
    )
    q, k = (
        torch.view_as_real(
            torch.view_as_complex(layer(h).float().unflatten(-1, (32, 2))) * f
        ).flatten(-2)
        for layer in (m.a, m.b)
    )
    h = F.scaled_dot_product_attention(q, k, h.float())
    return h


@program(linear())
def hyperbolic(m: Any, h: Tensor) -> Tensor:
    x = m.a(h) * 0.3
    n = x.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    y = n.tanh() * x / n
    d = (y[:, 1:] - y[:, :-1]).square().sum(-1)
    return torch.acosh(
        (1 + 2 * d / ((1 - y[:, 1:].square().sum(-1)) * (1 - y[:, :-1].square().sum(-1)) + 1e-5))
        .float()
        .clamp(min=1 + 1e-6)
    )


@program(linear(32), linear(64, 32))
def gumbel(m: Any, h: Tensor) -> Tensor:
    return (
        m.b(F.gumbel_softmax(m.a(h) * 3, tau=0.5, hard=True))
        + m.b(F.gumbel_softmax(m.a(h), tau=0.3)).tanh()
    )


@program(linear(), lambda: nn.Parameter(torch.tensor(0.05)))
def lsq(m: Any, h: Tensor) -> Tensor:
    s = m.b
    x = m.a(h) / s
    x = x.clamp(-8, 7)
    x = (x.round() - x).detach() + x
    return x * s


@program(lambda: nn.Embedding(16, 64))
def vq(m: Any, h: Tensor) -> Tensor:
    z = h.flatten(0, 1)
    d = z.square().sum(1, keepdim=True) - 2 * z @ m.a.weight.T + m.a.weight.square().sum(1)
    q = m.a(d.argmin(1))
    return z + (q - z).detach() + (q - z.detach()).square() + 0.25 * (q.detach() - z).square()


@program(linear(4), lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(4)))
def moe_aux(m: Any, h: Tensor) -> Tensor:
    g = m.a(h).softmax(-1)
    v, i = g.topk(2, -1)
    v = v / v.sum(-1, keepdim=True)
    y = torch.zeros_like(h)
    for e, expert in enumerate(m.b):
        b, t, k = (i == e).nonzero(as_tuple=True)
        y = y.index_put(
            (b, t), (expert(h[b, t]) * v[b, t, k].unsqueeze(-1)).to(y.dtype), accumulate=True
        )
    f = F.one_hot(i[..., 0], 4).to(h).mean((0, 1))
    return y + 4 * (f * g.mean((0, 1))).sum() + m.a(h).logsumexp(-1).square().mean()


@program(linear(), linear(1, 128))
def pyg_softmax(m: Any, h: Tensor) -> Tensor:
    x = m.a(h).flatten(0, 1)
    i, j = edges()
    e = F.leaky_relu(m.b(torch.cat([x[i], x[j]], -1)), 0.2).squeeze(-1)
    most = torch.full((32,), -1e9).to(e).scatter_reduce(0, j, e, "amax")
    a = (e - most[j]).exp()
    a = a / (torch.zeros(32).to(e).scatter_add(0, j, a)[j] + 1e-16)
    return torch.zeros_like(x).index_add(0, j, a.unsqueeze(-1) * x[i])


@program(linear())
def pna(m: Any, h: Tensor) -> Tensor:
    x = m.a(h).flatten(0, 1)
    i, j = edges()

    def red(v: Tensor, r: str) -> Tensor:
        return torch.zeros_like(x).scatter_reduce(
            0, j[:, None].expand(-1, 64), v, r, include_self=False
        )

    me = red(x[i], "mean")
    sd = (red(x[i] ** 2, "mean") - me**2).clamp(min=0).add(1e-5).sqrt()
    return torch.cat(
        [me, sd, red(x[i], "amax"), red(x[i], "amin"), red(1 + 0.1 * x[i].tanh(), "prod")], -1
    )


@program(linear(6), lambda: nn.Conv2d(64, 8, 3, padding=1))
def grid_sample(m: Any, h: Tensor) -> Tensor:
    x = h.transpose(1, 2).reshape(2, 64, 4, 4)
    theta = m.a(h.mean(1)).view(2, 2, 3) * 0.3 + torch.eye(2, 3)
    g = F.affine_grid(theta, (2, 8, 9, 9), align_corners=False)
    return F.grid_sample(m.b(x), g, align_corners=False) + F.grid_sample(
        m.b(x), g, mode="bicubic", padding_mode="reflection", align_corners=True
    )


@program(linear(50), lambda: nn.EmbeddingBag(50, 64, mode="sum"))
def sparse_embedding(m: Any, h: Tensor) -> Tensor:
    w, i = m.a(h).softmax(-1).topk(4)
    return m.b(i.flatten(0, 1), per_sample_weights=w.flatten(0, 1))


@program(lambda: nn.Parameter(torch.randn(1, 64)), linear())
def expanded(m: Any, h: Tensor) -> Tensor:
    y = m.b(h)[:, :1].expand(-1, 16, -1)
    return (y * h).sigmoid() * m.a.expand(16, 64) + y.as_strided((2, 16, 32), y.stride()).repeat(
        1, 1, 2
    ) * h


@program(
    lambda: nn.Conv3d(64, 32, 3, padding=1),
    lambda: nn.GroupNorm(8, 32),
    lambda: nn.Conv3d(32, 8, 1),
)
def conv3d_cl(m: Any, h: Tensor) -> Tensor:
    x = h.transpose(1, 2).reshape(2, 64, 4, 2, 2).to(memory_format=torch.channels_last_3d)
    return m.c(F.silu(m.b(m.a(x)))).to(memory_format=torch.contiguous_format)


@program(lambda: nn.Parameter(torch.randn(3, 64, 64) / 8))
def vmap_ensemble(m: Any, h: Tensor) -> Tensor:
    h = torch.vmap(lambda w: F.gelu(h @ w).square().mean(1))(m.a)
    return h


@program(linear(), linear())
def jagged(m: Any, h: Tensor) -> Tensor:
    n = torch.nested.nested_tensor_from_jagged(h.flatten(0, 1), torch.tensor([0, 5, 12, 20, 32]))
    q = F.gelu(m.a(n)) * n
    return m.b(q).values()


@program(
    lambda: nn.MultiheadAttention(64, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True)
)
def mha_bias_kv(m: Any, h: Tensor) -> Tensor:
    h, w = m.a(h * 3, h, h, average_attn_weights=False)
    return h * w.mean()


@program(
    linear(), linear(8), linear(8), lambda: nn.Parameter(torch.arange(1.0, 9.0).log().repeat(64, 1))
)
def mamba(m: Any, h: Tensor) -> Tensor:
    dt = F.softplus(m.a(h))
    b, c = m.b(h), m.c(h)
    da = (dt.unsqueeze(-1) * -m.d.exp()).exp()
    db = dt.unsqueeze(-1) * b.unsqueeze(2)
    s = h.new_zeros(2, 64, 8)
    ys = []
    for t in range(16):
        s = da[:, t] * s + db[:, t] * h[:, t].unsqueeze(-1)
        ys.append((s * c[:, t].unsqueeze(1)).sum(-1))
    return torch.stack(ys, 1) * F.silu(h)


@program(linear(192), lambda: nn.Parameter(torch.linspace(-3, 1, 64)))
def rwkv(m: Any, h: Tensor) -> Tensor:
    r, k, v = m.a(h).chunk(3, -1)
    w = (-m.b.exp()).exp()
    num = den = h.new_zeros(2, 64)
    out = []
    for t in range(16):
        e = k[:, t].exp()
        out.append((num + e * v[:, t]) / (den + e + 1e-6))
        num, den = w * num + e * v[:, t], w * den + e
    return r.sigmoid() * torch.stack(out, 1)


@program(linear(128))
def maxout(m: Any, h: Tensor) -> Tensor:
    h = m.a(h).unflatten(-1, (64, 2)).max(-1).values
    return torch.stack(h.chunk(2, -1), -1).sort(-1).values.flatten(-2)


@program(lambda: nn.LSTM(64, 64, batch_first=True))
def lstm_saturated(m: Any, h: Tensor) -> Tensor:
    h, (_, c) = m.a(h * 40)
    return h + c.tanh()[0][:, None]


def _wkv(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """rwkv: a running maximum keeps exponentials in bounds."""
    above, below = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
    largest, results = torch.full_like(k[:, 0], -1e9), []
    for t in range(k.shape[1]):
        new = torch.maximum(largest, k[:, t])
        old, one = (largest - new).exp(), (k[:, t] - new).exp()
        above, below = old * above + one * v[:, t], old * below + one
        results.append(above / below)
        largest = new - decay
    return torch.stack(results, 1)


@program(linear(192), lambda: nn.Parameter(torch.zeros(64)), linear())
def time_mixing(m: Any, h: Tensor) -> Tensor:
    k, v, r = m.a(h - 0.5 * h.roll(1, 1)).chunk(3, -1)
    mixed = _wkv(k * 3, v, F.softplus(m.b))
    return m.c(r.sigmoid() * mixed) + F.relu(k).square()
