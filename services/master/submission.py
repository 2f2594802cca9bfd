"""Could a job run at all, with the policies, data sets and jobs that there are?

In: a spec, as it is submitted, and once more when a pipeline's stage begins. Out: nothing, or the reason why not.
Never: a change of anything, or a word about what only its turn can tell, such as data that is still being checked.
"""

from __future__ import annotations

from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec, JobSpec, PipelineSpec, PolicySpec, RlSpec, SftSpec
from joynexus.wire import ErrorCode
from services.master.catalog import faulty
from services.master.checks import Recipe, check_decisions, check_execute, recipe_difference, says_nothing
from services.master.driving_job import check_recipe, to_be_created
from services.master.job import Tools
from services.master.outbox import refuse
from services.master.training_job import make_spec


def trains(spec: JobSpec) -> bool:
    """Tell whether a job trains its policy, and so makes it if there is none."""
    stages = spec.stages if isinstance(spec, PipelineSpec) else (spec,)
    return any(isinstance(stage, SftSpec | RlSpec) for stage in stages)


def check_possible(tools: Tools, tenant: str, spec: JobSpec, *, behind: bool) -> None:
    """Refuse a job that could never run.

    Args:
        behind: a job that was submitted earlier trains the policy, and makes it if there is none.
    """
    policy = tools.policies.find(tenant, spec.policy)
    recipe: PolicySpec | Recipe | None = policy.spec if policy is not None else None
    maker, trained = 0, False  # the stage that makes the policy; whether a stage has trained it
    for number, stage in enumerate(spec.stages if isinstance(spec, PipelineSpec) else (spec,), 1):
        if isinstance(stage, SftSpec | EvaluateDatasetSpec):
            _check_dataset(tools, tenant, stage.dataset)
        if isinstance(stage, EvaluateSpec | EvaluateDatasetSpec):
            if not trained or stage.version:
                evaluated_version(tools, tenant, stage)
        elif not trained and to_be_created(policy, stage.create):
            if policy is not None or not (behind and says_nothing(stage.create)):
                tools.policies.check_module(stage.create.backbone, stage.create.head)
                recipe, maker = _recipe(tools, tenant, stage), number
            trained = True
        else:
            trained = True
            if maker:
                _check_stage(recipe, stage, number, maker)
            elif policy is not None:
                check_recipe(policy, stage.create)
        if isinstance(stage, RlSpec | EvaluateSpec) and recipe is not None:
            check_execute(stage.execute, recipe.chunk, spec.policy)
        if isinstance(stage, RlSpec) and recipe is not None:
            limit = recipe.contract.episode_limit if isinstance(recipe, PolicySpec) else 0
            check_decisions(stage, recipe.chunk, stage.episode_limit or limit)


def evaluated_version(tools: Tools, tenant: str, spec: EvaluateSpec | EvaluateDatasetSpec) -> int:
    """Return the version that an evaluation is about.

    Raises:
        JoyNexusError: there is none, or inference has refused it.
    """
    found = tools.policies.version(tenant, spec.policy, spec.version)
    if found.refused:
        raise refuse(ErrorCode.NOT_FOUND, f"version {found.version} cannot be served: {found.refused}")
    return found.version


def _recipe(tools: Tools, tenant: str, stage: SftSpec | RlSpec) -> PolicySpec | Recipe:
    """Return what is known of a policy that a stage will make."""
    if isinstance(stage, RlSpec):
        return stage.create
    found = tools.catalog.find(tenant, stage.dataset)
    return stage.create if found.contract is None else make_spec(stage.create, found)


def _check_stage(recipe: PolicySpec | Recipe | None, stage: SftSpec | RlSpec, number: int, maker: int) -> None:
    difference = recipe_difference(recipe, stage.create) if recipe is not None else None
    if difference is not None:
        raise refuse(
            ErrorCode.CONFLICT,
            f"stage {number} contradicts stage {maker}, which makes policy '{stage.policy}': {difference}; "
            f"leave 'create' out of stage {number}",
        )


def _check_dataset(tools: Tools, tenant: str, name: str) -> None:
    found = tools.catalog.find(tenant, name)
    if found.state == "faulty":
        raise faulty(found)
