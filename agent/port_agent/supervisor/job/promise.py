"""What is promised for a job before it runs: memory, time, energy and flash writes of a step, and when the job ends."""

from port_agent.jobs.job import Job, JobPromise, JobRequestError, JobSpec
from port_agent.policy.usual_times import UsualTimes
from port_agent.supervisor.job.plan_choice import PlanFigures, WriteAllowance, choose_plan, eta_s
from port_agent.supervisor.job.run_state import RunConditions
from port_agent.supervisor.job.worker_kinds import BundleFacts
from port_agent.system.clock import local_time

_DAY_S = 86400.0


def left_s(job: Job) -> float:
    """Return the remaining seconds of a job's training, as far as known."""
    step_s = job.measured.step_s or (job.promise.step_s if job.promise else None)
    return eta_s(job.step, total_steps(job), step_s) or 0.0


def total_steps(job: Job) -> int | None:
    """Return the number of steps of a job, as far as it is known."""
    return job.total_steps or (job.promise.steps if job.promise else None)


def promised_plan(spec: JobSpec, facts: BundleFacts, conditions: RunConditions, wall_s: float) -> PlanFigures | None:
    """Return the plan that the job would start with on an ordinary day; None when none fits."""
    return choose_plan(
        facts.plans,
        conditions.memory_bytes,
        steps_left=steps_of(spec, facts),
        time_left_s=None if spec.deadline_at is None else spec.deadline_at - wall_s,
        allowance=WriteAllowance(conditions.flash_budget_bytes_per_day, _DAY_S),
    )


def promise(
    spec: JobSpec,
    facts: BundleFacts,
    plan: PlanFigures,
    conditions: RunConditions,
    times: UsualTimes,
    wall_s: float,
    before_s: float,
) -> JobPromise | None:
    """Return the promise for a job that runs `plan` after `before_s` seconds of training of other jobs.

    None for a bundle that does not say how long its steps take. If a usual day's training would exceed the daily budget
    of flash writes, training stops then, and the job takes correspondingly longer.
    """
    steps = steps_of(spec, facts)
    if plan.step_s is None or plan.step_joules is None:
        return None
    forecast = None
    if steps is not None:
        usual_s = times.usual_day_s() or 0.0
        written_a_day = usual_s / plan.step_s * plan.written_bytes if plan.step_s else 0.0
        factor = max(1.0, written_a_day / max(1, conditions.flash_budget_bytes_per_day))
        forecast = times.forecast(local_time(wall_s), before_s + steps * plan.step_s * factor)
    return JobPromise(
        plan=plan.index,
        peak_bytes=plan.peak_bytes,
        step_s=plan.step_s,
        step_joules=plan.step_joules,
        written_bytes=plan.written_bytes,
        steps=steps,
        ends_at=forecast.ends_at.timestamp() if forecast and forecast.ends_at else None,
        nights=forecast.nights if forecast else None,
    )


def check_known(spec: JobSpec, facts: BundleFacts) -> None:
    """Raise JobRequestError if the bundle lacks the optimizer's numbers for so many batches,
    or has no epochs to judge.
    """
    if facts.follows_losses and (spec.data is not None or spec.waits_for_data or spec.federated):
        raise JobRequestError(
            "the job's learning rates follow the losses of its own epochs (ReduceLROnPlateau); data from an inbox and "
            "rounds of a federation have no such epochs: plan it with another scheduler"
        )
    steps = steps_of(spec, facts)
    if facts.known_steps is not None and steps is not None and steps > facts.known_steps:
        raise JobRequestError(
            f"the job trains {steps:,} steps, but its bundle has the learning rates and other changing numbers of only "
            f"{facts.known_steps:,}; plan it again with more --epochs, or train less"
        )


def steps_of(spec: JobSpec, facts: BundleFacts) -> int | None:
    """Return the number of batches of the job; None if its data is not in the bundle."""
    if spec.steps is not None:
        return spec.steps
    if spec.data is not None or spec.waits_for_data or facts.steps_per_epoch is None:
        return None
    return facts.steps_per_epoch * (spec.epochs or 1)
