"""ManiSkill's tasks: texts, episode limits, controllers and what each needs, known without importing ManiSkill.

In: a task's name. Out: its entry in the table. Never: an import of a simulator, or a task under whose name nothing can
succeed or be rewarded (ManiSkill's empty scenes).
"""

from __future__ import annotations

from typing import NamedTuple

FAMILY = "maniskill"
EE_DELTA_POSE = "pd_ee_delta_pose"
JOINT_DELTA = "pd_joint_delta_pos"
JOINT_TARGET = "pd_joint_pos"
BASE, HAND = "base_camera", "hand_camera"
_TWO = (BASE, "panda_wristcam-0-hand_camera", "panda_wristcam-1-hand_camera")


class Task(NamedTuple):
    """One task of ManiSkill.

    Attributes:
        instruction: ManiSkill has no texts: these are ours.
        limit: ManiSkill's own steps of an episode.
        control: controller that actions go to.
        reward: `normalized_dense` (0 to 1 a step), or `sparse` (1 where it is solved) where ManiSkill has no other.
        assets: what ManiSkill has to download before the task can be made; empty if the package has all.
        packages: Python packages that it needs besides.
        cameras: ManiSkill's own, which policies may ask for.
    """

    instruction: str
    limit: int
    control: str = EE_DELTA_POSE
    reward: str = "normalized_dense"
    assets: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    cameras: tuple[str, ...] = (BASE,)


TASKS: dict[str, Task] = {
    # Tabletop, one Panda arm
    "LiftPegUpright-v1": Task("stand the peg upright on the table", 50),
    "PegInsertionSide-v1": Task(
        "pick up the peg and insert its orange end into the hole of the box", 100, cameras=(BASE, HAND)
    ),
    "PickCube-v1": Task("pick up the red cube and move it to the goal", 50),
    "PlaceSphere-v1": Task("pick up the sphere and place it in the bin", 50),
    "PlugCharger-v1": Task(
        "pick up the charger and plug it into the receptacle", 200, reward="sparse", cameras=(BASE, HAND)
    ),
    "PokeCube-v1": Task("pick up the peg and poke the cube to the goal with it", 50),
    "PullCube-v1": Task("pull the cube to the goal", 50),
    "PullCubeTool-v1": Task("pick up the tool and pull the cube within reach with it", 100),
    "PushCube-v1": Task("push the cube to the goal", 50),
    "PushT-v1": Task("push the T-shaped block onto its outline", 100),
    "RollBall-v1": Task("push the ball so that it rolls to the goal", 80),
    "StackCube-v1": Task("pick up the red cube and stack it on the green cube", 50, cameras=(BASE, HAND)),
    "StackPyramid-v1": Task(
        "put the red cube beside the green one and stack the blue cube on both",
        250,
        reward="sparse",
        cameras=(BASE, HAND),
    ),
    "FMBAssembly1Easy-v1": Task("assemble the bridge on the board", 500, reward="sparse"),
    "DrawTriangle-v1": Task("draw the outline of the triangle", 300, reward="sparse"),
    "DrawSVG-v1": Task("draw the outline on the canvas", 500, reward="sparse", packages=("svgpathtools",)),
    "AssemblingKits-v1": Task("put the misplaced shape into its slot of the kit", 200, assets=("assembling_kits",)),
    "PickSingleYCB-v1": Task("pick up the object and move it to the goal", 50, assets=("ycb",)),
    "PickClutterYCB-v1": Task(
        "pick up the marked object and move it to the goal", 100, assets=("ycb", "pick_clutter_ycb_configs")
    ),
    "TurnFaucet-v1": Task("turn the faucet on", 200, assets=("partnet_mobility_faucet",)),
    # Tabletop, other robots
    "PickCubeSO100-v1": Task("pick up the red cube and move it to the goal", 50, JOINT_DELTA),
    "PickCubeWidowXAI-v1": Task("pick up the red cube and move it to the goal", 50, JOINT_DELTA, assets=("widowxai",)),
    "SO100GraspCube-v1": Task("grasp the cube and lift it back to rest", 64, "pd_joint_target_delta_pos"),
    "TwoRobotPickCube-v1": Task("hand the cube from one arm to the other and move it to the goal", 100, cameras=_TWO),
    "TwoRobotStackCube-v1": Task("put one cube on the target and stack the other on it", 100, cameras=_TWO),
    # Hands
    "RotateValveLevel0-v1": Task("turn the valve", 80, JOINT_DELTA),
    "RotateValveLevel1-v1": Task("turn the valve", 150, JOINT_DELTA),
    "RotateValveLevel2-v1": Task("turn the valve", 150, JOINT_DELTA),
    "RotateValveLevel3-v1": Task("turn the valve", 150, JOINT_DELTA),
    "RotateValveLevel4-v1": Task("turn the valve", 300, JOINT_DELTA),
    "RotateSingleObjectInHandLevel0-v1": Task("rotate the cube in the hand", 300, JOINT_DELTA),
    "RotateSingleObjectInHandLevel1-v1": Task("rotate the cube in the hand", 300, JOINT_DELTA),
    "RotateSingleObjectInHandLevel2-v1": Task("rotate the object in the hand", 300, JOINT_DELTA, assets=("ycb",)),
    "RotateSingleObjectInHandLevel3-v1": Task("rotate the object in the hand", 300, JOINT_DELTA, assets=("ycb",)),
    "TriFingerRotateCubeLevel0-v1": Task("turn the cube to the goal", 250, JOINT_DELTA),
    "TriFingerRotateCubeLevel1-v1": Task("turn the cube to the goal", 250, JOINT_DELTA),
    "TriFingerRotateCubeLevel2-v1": Task("move and turn the cube to the goal", 250, JOINT_DELTA),
    "TriFingerRotateCubeLevel3-v1": Task("move and turn the cube to the goal", 250, JOINT_DELTA),
    "TriFingerRotateCubeLevel4-v1": Task("move and turn the cube to the goal", 250, JOINT_DELTA),
    "InsertFlower-v1": Task("put the flower into the vase", 300, JOINT_DELTA, assets=("oakink-v2",)),
    # Mobile robots and humanoids
    "UnitreeG1PlaceAppleInBowl-v1": Task(
        "pick up the apple and place it in the bowl", 100, JOINT_DELTA, cameras=(BASE, "head_camera")
    ),
    "UnitreeG1TransportBox-v1": Task(
        "carry the box to the other table", 100, JOINT_DELTA, cameras=(BASE, "head_camera")
    ),
    "UnitreeG1Stand-v1": Task("keep standing", 1000, JOINT_TARGET, reward="sparse", cameras=()),
    "UnitreeH1Stand-v1": Task("keep standing", 1000, JOINT_TARGET, reward="sparse", assets=("unitree_h1",)),
    "UnitreeGo2-Reach-v1": Task("walk to the goal", 200, JOINT_DELTA, assets=("unitree_go2",)),
    "AnymalC-Reach-v1": Task("walk to the goal", 200, JOINT_DELTA, assets=("anymal_c",)),
    "AnymalC-Spin-v1": Task("spin on the spot", 200, JOINT_DELTA, assets=("anymal_c",)),
    "OpenCabinetDrawer-v1": Task("open the drawer", 100, JOINT_DELTA, assets=("partnet_mobility_cabinet",)),
    "OpenCabinetDoor-v1": Task("open the door", 100, JOINT_DELTA, assets=("partnet_mobility_cabinet",)),
    # Control suite: rewarded without end, never solved
    "MS-CartpoleBalance-v1": Task("balance the pole", 1000, JOINT_DELTA),
    "MS-CartpoleSwingUp-v1": Task("swing the pole up and balance it", 1000, JOINT_DELTA),
    "MS-HopperStand-v1": Task("stand upright", 600, JOINT_DELTA, cameras=("cam0",)),
    "MS-HopperHop-v1": Task("hop forward", 600, JOINT_DELTA, cameras=("cam0",)),
    "MS-HumanoidStand-v1": Task("stand upright", 1000, JOINT_TARGET, cameras=("side_cam",)),
    "MS-HumanoidWalk-v1": Task("walk forward", 1000, JOINT_TARGET, cameras=("side_cam",)),
    "MS-HumanoidRun-v1": Task("run forward", 1000, JOINT_TARGET, cameras=("side_cam",)),
    "MS-AntWalk-v1": Task("walk forward", 1000, JOINT_DELTA, cameras=("side_cam",)),
    "MS-AntRun-v1": Task("run forward", 1000, JOINT_DELTA, cameras=("side_cam",)),
    # The bridge's digital twins
    "PutCarrotOnPlateInScene-v1": Task("put the carrot on the plate", 60, "", assets=("bridge_v2_real2sim",)),
    "PutEggplantInBasketScene-v1": Task("put the eggplant into the basket", 120, "", assets=("bridge_v2_real2sim",)),
    "PutSpoonOnTableClothInScene-v1": Task("put the spoon on the towel", 60, "", assets=("bridge_v2_real2sim",)),
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": Task(
        "stack the green cube on the yellow cube", 60, "", assets=("bridge_v2_real2sim",)
    ),
}

NO_TASKS = {
    "Empty-v1": "is an empty scene",
    "TableTopFreeDraw-v1": "has no goal",
    "RoboCasaKitchen-v1": "is a scene without a goal",
    "SceneManipulation-v1": "is a scene without a goal",
    "ReplicaCAD_SceneManipulation-v1": "is a scene without a goal",
    "ArchitecTHOR_SceneManipulation-v1": "is a scene without a goal",
}
"""Names of ManiSkill that nothing can succeed in, and why."""
