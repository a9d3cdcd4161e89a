# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam once more, as plainly as possible: whole matrices, one at a time, nothing reused."""

from dataclasses import dataclass

import torch

from torchtitan_lr.optim.tsr.svd import draw_basis, draw_sketches


@dataclass(frozen=True)
class Hyper:
    """Adam's constants, and TSR-Adam's scaling factor."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    scale: float = 1.0

    def defaults(self):
        """As the optimizer takes them."""
        return {name: value for name, value in vars(self).items() if name != "scale"}


def orthonormal(y):
    q, r = torch.linalg.qr(y)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def leading_triplets(g, omega, rank, power_iterations):
    q = orthonormal(g @ omega)
    for _ in range(power_iterations):
        q = orthonormal(g @ orthonormal(g.T @ q))
    small_u, s, small_vt = torch.linalg.svd(q.T @ g, full_matrices=False)
    u, v = q @ small_u[:, :rank], small_vt[:rank].T
    flip = torch.where(omega[:, 0] @ v < 0, -1.0, 1.0)
    present = s[:rank] > s[0] * len(s) * torch.finfo(s.dtype).eps
    return u * flip * present, s[:rank], v * flip * present


def turned(new, old):
    """Each column of a new basis as itself or its negative, whichever is closer to the old one."""
    closer = (new - old).norm(dim=0) <= (new + old).norm(dim=0)
    return torch.where(closer, new, -new)


class ReferenceTSR:
    """One process; weights and gradients are whole matrices by name.

    `step` takes the sum of all gradients, clips by the norm of what is used, and updates in place.
    """

    def __init__(self, weights, plans, settings, hyper, max_norm=float("inf")):
        self.weights, self.plans, self.settings = weights, plans, settings
        self.hyper, self.max_norm = hyper, max_norm
        self.t = 0
        self.state = {}

    def step(self, gradients):
        used = {name: self.project(name, g) for name, g in gradients.items()}
        norm = torch.stack([c.norm() for c in used.values()]).norm()
        factor = min(1.0, self.max_norm / (norm.item() + 1e-6))
        self.t += 1
        for name, c in used.items():
            self.update(name, c * factor)
        return norm.item()

    def project(self, name, g):
        if name not in self.plans:
            return g
        plan = self.plans[name]
        g = g.T if plan.transposed else g
        state = self.state.setdefault(name, {"refreshes": 0})
        if self.settings.start == "random" and "u" not in state:
            self.draw(name, g)
        if "u" not in state or self.t % plan.interval == plan.offset:
            self.refresh(name, g)
        c = state["u"].T @ g
        return c @ state["v"] if plan.two_sided else c

    def draw(self, name, g):
        plan, state = self.plans[name], self.state[name]
        u = draw_basis(f"{name}:left", (plan.rows, plan.rank)).to(g)
        v = draw_basis(f"{name}:right", (plan.columns, plan.rank)).to(g)
        m = g.new_zeros(plan.rank, plan.rank if plan.two_sided else plan.columns)
        state.update(u=u, v=v if plan.two_sided else None, m=m, v2=m.clone(), age=0)

    def refresh(self, name, g):
        plan, state = self.plans[name], self.state[name]
        key = (name, state["refreshes"])
        omega = draw_sketches([key], (plan.columns, plan.width), g)[0]
        u, _, v = leading_triplets(g, omega, plan.rank, self.settings.power_iterations)
        if "u" in state:
            u, v = turned(u, state["u"]), turned(v, state["v"]) if plan.two_sided else v
        if "u" not in state:
            shape = (plan.rank, plan.rank if plan.two_sided else plan.columns)
            state["m"], state["v2"] = g.new_zeros(shape), g.new_zeros(shape)
            state["age"] = 0
        elif self.settings.moments == "rotate":
            p = u.T @ state["u"]
            w = v.T @ state["v"] if plan.two_sided else torch.eye(plan.columns, dtype=g.dtype)
            state["m"] = p @ state["m"] @ w.T
            state["v2"] = (p * p) @ state["v2"] @ (w * w).T
        state.update(u=u, v=v, refreshes=state["refreshes"] + 1)

    def update(self, name, c):
        h, weight = self.hyper, self.weights[name]
        state = self.state.setdefault(name, {})
        if "m" not in state:
            state.update(m=torch.zeros_like(c), v2=torch.zeros_like(c), age=0)
        state["age"] += 1
        state["m"] = h.beta1 * state["m"] + (1 - h.beta1) * c
        state["v2"] = h.beta2 * state["v2"] + (1 - h.beta2) * c * c
        m = state["m"] / (1 - h.beta1 ** state["age"])
        v = state["v2"] / (1 - h.beta2 ** state["age"])
        d = m / (v.sqrt() + h.eps)
        if name in self.plans:
            plan = self.plans[name]
            d = state["u"] @ d @ (state["v"].T if plan.two_sided else torch.eye(d.shape[1]).to(d))
            d = h.scale * (d.T if plan.transposed else d)
        weight.sub_(h.lr * d + h.lr * h.weight_decay * weight)
