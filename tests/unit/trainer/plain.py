"""Training of one policy in a plain loop, with nobody else there: what an engine must come to, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from joynexus.vla.learner import learning_rate
from joynexus.vla.policy import Policy
from tests.unit.workers import Arrays, NoiseBackbone


def plain_loop(made_of, batches: list[Arrays], draws: Sequence[int] | None = None) -> list[float]:
    """What a researcher would write: module, seed, features, AdamW, clipping, warm-up; `draws` are the ops' numbers."""
    backbone = NoiseBackbone()
    policy = Policy(made_of, backbone.digest, backbone.hidden_size)
    settings = made_of.optimizer
    optimizer = torch.optim.AdamW(
        policy.module.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    losses = []
    for step, arrays in enumerate(batches):
        optimizer.zero_grad()
        features, draw = backbone.forward(arrays.observations()), draws[step] if draws else 0
        loss = policy.loss(features, arrays.state, arrays.action, arrays.mask, draw=draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), settings.grad_clip)
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step)
        optimizer.step()
        losses.append(loss.item())
    return losses
