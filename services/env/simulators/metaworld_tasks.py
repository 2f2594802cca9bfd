"""MetaWorld's 50 tasks: their texts and their contract, known without importing MetaWorld.

In: a task's name. Out: its instruction, its contract. Never: an import of a simulator; whoever checks a
job needs this where none is installed.
"""

from __future__ import annotations

from joynexus.contract import Camera, Contract
from joynexus.simulation.interface import SimulatorOptions

FAMILY = "metaworld"
MAX_EPISODE_LIMIT = 500  # MetaWorld itself refuses to step further
CAMERA_NAMES = ("corner", "corner2", "corner3", "topview", "behindGripper", "gripperPOV")
DEFAULT_EPISODE_LIMIT = 200
# MetaWorld's corner2 hangs upside down: turned by half a circle the table stands on the floor, as in the pictures that
# backbones were trained on.
DEFAULT_CAMERAS = (Camera(name="corner2", height=64, width=64, rotation_deg=180),)

INSTRUCTIONS = {
    "assembly-v3": "pick up the wrench and put its ring onto the peg",
    "basketball-v3": "pick up the basketball and drop it through the hoop",
    "bin-picking-v3": "move the cube from one bin to the other bin",
    "box-close-v3": "pick up the lid and close the box with it",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button down from above",
    "button-press-v3": "press the button on the front of the box",
    "button-press-wall-v3": "reach around the wall and press the button on the front of the box",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial by half a circle",
    "disassemble-v3": "pick up the wrench and lift its ring off the peg",
    "door-close-v3": "push the door closed",
    "door-lock-v3": "turn the lock of the door to lock it",
    "door-open-v3": "pull the door open by its handle",
    "door-unlock-v3": "turn the lock of the door to unlock it",
    "hand-insert-v3": "put the gripper into the hole in the table",
    "drawer-close-v3": "push the drawer closed",
    "drawer-open-v3": "pull the drawer open by its handle",
    "faucet-open-v3": "turn the faucet counterclockwise to open it",
    "faucet-close-v3": "turn the faucet clockwise to close it",
    "hammer-v3": "pick up the hammer and drive the nail into the wall",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "pick-place-wall-v3": "pick up the puck, lift it over the wall and hold it at the goal",
    "pick-out-of-hole-v3": "pick the puck out of the hole and hold it at the goal",
    "pick-place-v3": "pick up the puck and hold it at the goal",
    "plate-slide-v3": "slide the plate forward into the cabinet",
    "plate-slide-side-v3": "slide the plate sideways into the cabinet",
    "plate-slide-back-v3": "slide the plate backward out of the cabinet",
    "plate-slide-back-side-v3": "slide the plate sideways out of the cabinet",
    "peg-insert-side-v3": "pick up the peg and insert it into the hole from the side",
    "peg-unplug-side-v3": "pull the peg sideways out of its hole",
    "soccer-v3": "push the ball into the soccer goal",
    "stick-push-v3": "pick up the stick and push the thermos with it",
    "stick-pull-v3": "pick up the stick and pull the thermos with it",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "push-back-v3": "push the block back to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper around the wall to the goal",
    "shelf-place-v3": "pick up the block and place it on the shelf",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-open-v3": "slide the window open by its handle",
    "window-close-v3": "slide the window closed by its handle",
}


def contract(options: SimulatorOptions) -> Contract:
    """Return the contract, the same for all 50 tasks.

    The state is MetaWorld's observation with the goal in it: hand position, gripper opening, position and quaternion of
    two objects, all that again one step earlier, goal position. A quaternion's order differs from task to task (as
    MetaWorld's own code has it), so that the contract states none.

    Raises:
        ValueError: if the options ask for a camera or an episode that MetaWorld does not have.
    """
    cameras = DEFAULT_CAMERAS if options.cameras is None else options.cameras
    for camera in cameras:
        if camera.name not in CAMERA_NAMES:
            raise ValueError(f"MetaWorld has no camera '{camera.name}': use one of {', '.join(CAMERA_NAMES)}")
        if not (1 <= camera.height <= 1024 and 1 <= camera.width <= 1024):
            raise ValueError(f"camera '{camera.name}' asks for {camera.width}x{camera.height} pixels: 1 to 1024 a side")
    limit = options.episode_limit or DEFAULT_EPISODE_LIMIT
    if not 0 < limit <= MAX_EPISODE_LIMIT:
        raise ValueError(f"episode_limit is {limit}: MetaWorld's episodes have 1 to {MAX_EPISODE_LIMIT} steps")
    return Contract(
        robot="sawyer",
        cameras=cameras,
        state_dim=39,
        action_dim=4,
        state_names=_state_names(),
        action_names=("hand_dx", "hand_dy", "hand_dz", "gripper"),
        control_mode="delta_ee_position",
        gripper="-1_open_+1_close",
        action_low=(-1.0,) * 4,
        action_high=(1.0,) * 4,
        rate_hz=80.0,
        episode_limit=limit,
        rendering=("antialiasing=2x2", "reflections=off", "shadows=off") if cameras else (),
    )


def _state_names() -> tuple[str, ...]:
    now = ["hand_x", "hand_y", "hand_z", "gripper_opening"]
    for thing in ("object1", "object2"):
        now += [f"{thing}_{axis}" for axis in "xyz"] + [f"{thing}_quat{i}" for i in range(4)]
    return (*now, *(f"previous_{name}" for name in now), "goal_x", "goal_y", "goal_z")
