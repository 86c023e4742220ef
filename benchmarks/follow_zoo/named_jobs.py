"""Jobs by name, for a script that is run in a process of its own: `begun("losses/focal")`."""

from port_planner.job import TrainingJob


def begun(name: str) -> TrainingJob:
    """Return the job that the tables call `name`, made from fixed seeds.

    Raises KeyError for one that does not exist.
    """
    from benchmarks.follow_zoo.compare import seed

    kind, _, rest = name.partition("/")
    seed()
    if kind == "job":
        from benchmarks.follow_zoo import programs

        return programs.job(int(rest))
    if kind == "transformers":
        from benchmarks.follow_zoo.bundles import job_of

        return job_of(*rest.split("/", 1))
    from benchmarks.follow_zoo.stranger_jobs import registered

    return registered()[name]()
