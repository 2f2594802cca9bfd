"""A follower: forwards the rows that it is given, on a device of its own.

In: a loaded backbone and the link to the leader. Out: features, as tensors of bytes, and what they took. Never: a
store, a policy, a gradient, or a decision: a forward that fails is reported, and the leader finds out whose fault it
is.
"""

from __future__ import annotations

import torch

from joynexus.vla.backbones.base import Backbone
from joynexus.vla.backbones.spread import Calibrate, Calibrated, DeviceLost, Link, Made, Part, hello, take_part
from joynexus.vla.busy import BusyClock


def serve(backbone: Backbone, link: Link) -> None:
    """Forward what comes until the leader is gone.

    Raises:
        torch.AcceleratorError: the device is lost to this process.
    """
    clock = BusyClock(backbone.device)
    try:
        link.tell(hello(backbone))
        while True:
            message = link.hear()
            match message:
                case Part():
                    _forward(backbone, link, message, clock)
                case Calibrate():
                    backbone.group_exactly = message.group_exactly
                    link.tell(Calibrated(backbone.calibrate()))
                case _:
                    raise ValueError(f"a leader says no {type(message).__name__}")
    except DeviceLost:
        return  # nobody is left to work for


def _forward(backbone: Backbone, link: Link, part: Part, clock: BusyClock) -> None:
    observations = take_part(link, part)
    backbone.group_exactly = part.group_exactly
    elapsed = clock.start()
    try:
        features = backbone.forward(observations, part.layers)
        hidden = torch.stack([torch.cat([each.layers[layer] for each in features]) for layer in part.layers])
        kinds = torch.cat([each.token_type for each in features])
    except torch.AcceleratorError:
        raise
    except Exception as error:  # as in SharedForward: whatever it is, the leader judges
        shortage = isinstance(error, MemoryError | torch.OutOfMemoryError)
        link.tell(Made((), elapsed(), error=f"{type(error).__name__}: {error}", shortage=shortage))
        return
    link.tell(Made(tuple(each.length for each in features), elapsed()))
    link.send(hidden)
    link.send(kinds)
