"""Would fusing the private parts of several tenants pay? Eight `oft` heads, and the optimizers of eight policies.

In: heads of equal shape. Out: for each way the CPU time one after another, fused, their ratio, and whether all bits are
equal (docs/adr/0009). Never: time that other processes took, or two ways measured at different moments.

    .venv/bin/python -m benchmarks.fused_heads [--quick]
"""

from __future__ import annotations

from joynexus.vla import numerics

numerics.configure(1)

# torch may only be imported after `configure`.
import copy  # noqa: E402
import itertools  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call, grad_and_value, stack_module_state, vmap  # noqa: E402
from torch.optim.adamw import adamw  # noqa: E402

from benchmarks import _report  # noqa: E402
from joynexus.contract import Contract  # noqa: E402
from joynexus.specs import PolicySpec  # noqa: E402
from joynexus.vla.feature import PaddedFeature  # noqa: E402
from joynexus.vla.modules import build_module  # noqa: E402
from joynexus.vla.noise import Noise  # noqa: E402

TENANTS, HIDDEN, TOKENS, STATE, ACTION, CHUNK = 8, 576, 80, 5, 3, 8
SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 1e-4, "eps": 1e-8}


class Loss(nn.Module):
    """A head's loss as a function of tensors alone."""

    def __init__(self, head: str, seed: int) -> None:
        super().__init__()
        contract = Contract(robot="bench", cameras=(), state_dim=STATE, action_dim=ACTION)
        spec = PolicySpec(backbone="none", head=head, contract=contract, chunk=CHUNK, normalization="none", seed=seed)
        self.head = build_module(spec, HIDDEN)

    def forward(self, tokens: Tensor, mask: Tensor, state: Tensor, action: Tensor, valid: Tensor) -> Tensor:
        """Return `ActionModule.loss`."""
        return self.head.loss(PaddedFeature({-1: tokens}, mask), state, action, valid, Noise([0] * len(state)))


def main(argv: Sequence[str] | None = None) -> None:
    options = _report.arguments("fused_heads", "Private parts fused across tenants, against one after another.", argv)
    rows = [loss_row(batch, 5 if options.quick else 40) for batch in (1, 8, 64)]
    rows += [optimizer_row(head, 10 if options.quick else 40) for head in ("oft", "groot")]
    _report.write("fused_heads", options, rows)


def loss_row(batch: int, runs: int) -> _report.Row:
    """Loss and gradient of eight `oft` heads, whose parameters stay stacked from step to step."""
    losses = [Loss("oft", seed) for seed in range(TENANTS)]
    batches = [_samples(seed, batch) for seed in range(TENANTS)]
    stacked = {name: tensor.detach() for name, tensor in stack_module_state(losses)[0].items()}
    shape = copy.deepcopy(losses[0]).to("meta")
    together = vmap(grad_and_value(lambda parameters, *samples: functional_call(shape, parameters, samples)))

    def apart() -> list[dict[str, Tensor]]:
        found = []
        for loss, samples in zip(losses, batches, strict=True):
            loss.zero_grad()
            loss(*samples).backward()
            found.append({name: p.grad for name, p in loss.named_parameters()})
        return found

    def fused() -> dict[str, Tensor]:
        gradients, _ = together(stacked, *(torch.stack(each) for each in zip(*batches, strict=True)))
        return gradients

    alone, all_of_them = apart(), fused()
    pairs = [(alone[i][name], gradient[i]) for name, gradient in all_of_them.items() for i in range(TENANTS)]
    equal = sum(torch.equal(one, other) for one, other in pairs)
    return _row(f"loss and gradient, oft, batch {batch}", apart, fused, f"{equal} of {len(pairs)} gradients", runs)


def optimizer_row(head: str, runs: int) -> _report.Row:
    """AdamW's fused function for each tenant, against once for all (which needs one learning rate for all)."""
    each = [_moments(Loss(head, seed)) for seed in range(TENANTS)]
    joined = [list(itertools.chain(*lists)) for lists in zip(*copy.deepcopy(each), strict=True)]

    def apart() -> None:
        for lists in each:
            _adamw(lists)

    def fused() -> None:
        _adamw(joined)

    apart(), fused()
    pairs = list(zip((p for lists in each for p in lists[0]), joined[0], strict=True))
    equal = sum(torch.equal(one, other) for one, other in pairs)
    return _row(f"AdamW, {head}", apart, fused, f"{equal} of {len(pairs)} parameters", runs)


def _row(
    what: str, apart: Callable[[], object], fused: Callable[[], object], bits_equal: str, runs: int
) -> _report.Row:
    apart(), fused()  # allocations of the first call are not the rule
    times = [(_cpu_ms(apart), _cpu_ms(fused)) for _ in range(runs)]
    return {
        "what": what,
        "apart_ms": _report.spread([a for a, _ in times]),
        "fused_ms": _report.spread([f for _, f in times]),
        "apart_to_fused": _report.spread([a / f for a, f in times]),
        "bits_equal": bits_equal,
    }


def _cpu_ms(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def _samples(seed: int, batch: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    tokens, state = (torch.randn(batch, *shape, generator=random) for shape in ((TOKENS, HIDDEN), (STATE,)))
    action = torch.randn(batch, CHUNK, ACTION, generator=random)
    return tokens, torch.ones(batch, TOKENS).bool(), state, action, torch.ones(batch, CHUNK).bool()


def _moments(loss: Loss) -> list[list[Tensor]]:
    """Parameters, gradients, both moments and step counts."""
    parameters = [p.detach() for p in loss.parameters()]
    gradients = [torch.full_like(p, 0.01) for p in parameters]
    zeros = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    return [parameters, gradients, *zeros, [torch.zeros(()) for _ in parameters]]


def _adamw(lists: list[list[Tensor]]) -> None:
    parameters, gradients, first, second, steps = lists
    adamw(parameters, gradients, first, second, [], steps, fused=True, amsgrad=False, maximize=False, **SETTINGS)


if __name__ == "__main__":
    main()
