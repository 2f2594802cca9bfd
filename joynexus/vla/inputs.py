"""Check what a tenant sent against its policy's contract, before it joins anybody else's work.

In: arrays off the wire and a contract. Out: observations for the backbone, or one sentence that says what was expected
and what came. Never: a repair. A picture of another size or a state of another length is refused, not resized or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from joynexus.contract import Contract
from joynexus.vla.feature import Observation
from joynexus.wire.errors import ErrorCode, JoyNexusError, failure

AnyArray = npt.NDArray[Any]


def check_array(name: str, array: AnyArray, dtype: str, shape: Sequence[int | None], why: str) -> None:
    """Refuse an array of another dtype or shape.

    Args:
        name: what the array is called on the wire.
        array: what came.
        dtype: expected dtype, by numpy's name.
        shape: expected lengths; None admits any.
        why: where the expectation comes from, to end the sentence.

    Raises:
        JoyNexusError: `BAD_DATA`, naming expected and got.
    """
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits or array.dtype != np.dtype(dtype):
        expected = ", ".join("any" if length is None else str(length) for length in shape)
        refuse(f"'{name}' is {array.dtype} {list(array.shape)}, but {dtype} [{expected}] is expected: {why}")


def check_finite(name: str, array: AnyArray, names: Sequence[str] = ()) -> None:
    """Refuse NaN and infinities; the sentence names the first sample and dimension.

    Args:
        name: what the array is called.
        array: [B, …, D] floats.
        names: names of the D dimensions, if there are any.

    Raises:
        JoyNexusError: `BAD_DATA`.
    """
    wrong = ~np.isfinite(array)
    if not wrong.any():
        return
    first = np.argwhere(wrong)[0]
    sample, dimension = int(first[0]), int(first[-1])
    label = f"dimension {dimension}" + (f" ({names[dimension]})" if dimension < len(names) else "")
    step = f", step {int(first[1])} of the chunk" if len(first) == 3 else ""
    value = array[tuple(first)]
    refuse(f"'{name}' of sample {sample}{step}, {label} is {value}: leave the sample out or repair it")


def observations(
    contract: Contract, rows: int, images: Sequence[AnyArray], instructions: Sequence[str]
) -> list[Observation]:
    """Make the backbone's observations of R rows.

    Args:
        contract: of the policy.
        rows: R, as the state has it.
        images: one [R, H, W, 3] uint8 array a camera, in the contract's order.
        instructions: R task texts.

    Raises:
        JoyNexusError: `BAD_DATA`, naming expected and got.
    """
    if len(instructions) != rows:
        refuse(f"{len(instructions)} instructions came for {rows} samples: send one for each sample")
    if len(images) != len(contract.cameras):
        named = ", ".join(camera.name for camera in contract.cameras) or "none"
        refuse(
            f"pictures of {len(images)} cameras came, but the policy's contract has {len(contract.cameras)} "
            f"({named}): send one array a camera, in this order"
        )
    for camera, array in zip(contract.cameras, images, strict=True):
        shape = (rows, camera.height, camera.width, 3)
        check_array(f"images of {camera.name}", array, "uint8", shape, "the contract fixes size and order of pictures")
    return [Observation(tuple(array[row] for array in images), instructions[row]) for row in range(rows)]


def check_state(contract: Contract, state: AnyArray) -> int:
    """Check the state [R, S] float32 of R rows and return R.

    Raises:
        JoyNexusError: `BAD_DATA` for a wrong shape, no rows, NaN or infinities.
    """
    check_array("state", state, "float32", (None, contract.state_dim), _DIMENSIONS)
    if not len(state):
        refuse("'state' has no rows: send at least one sample")
    check_finite("state", state, contract.state_names)
    return len(state)


def check_action(contract: Contract, chunk: int, rows: int, action: AnyArray, mask: AnyArray) -> None:
    """Check actions [R, chunk, A] float32 and their mask [R, chunk] bool.

    Raises:
        JoyNexusError: `BAD_DATA` for a wrong shape, a sample without any valid step, NaN or infinities (also in steps
            that are masked out: zero times NaN is NaN).
    """
    check_array("action", action, "float32", (rows, chunk, contract.action_dim), _DIMENSIONS + " and its chunk")
    check_array("action_mask", mask, "bool", (rows, chunk), "it says for each step of a chunk whether it counts")
    empty = np.flatnonzero(~mask.any(axis=1))
    if len(empty):
        refuse(f"'action_mask' of sample {int(empty[0])} has no valid step: leave the sample out")
    check_finite("action", action, contract.action_names)


def refuse(sentence: str) -> NoReturn:
    """Raise `JoyNexusError` with code `BAD_DATA`."""
    raise JoyNexusError(failure(ErrorCode.BAD_DATA, sentence))


_DIMENSIONS = "the policy's contract fixes its dimensions"
