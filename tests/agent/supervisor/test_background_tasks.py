"""Which finished jobs are deleted first."""

from agent.jobs.model import Job, JobSpec
from agent.supervisor.background_tasks import too_old


def test_the_oldest_jobs_go_first_beyond_count_or_size() -> None:
    jobs = [Job(number, JobSpec("x", "b"), 0.0) for number in range(1, 6)]
    sizes = {1: 10, 2: 50, 3: 10, 4: 10, 5: 10}
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=100) == []
    assert too_old(jobs, sizes, keep_jobs=3, keep_bytes=100) == [1, 2]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=80) == [1]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=40) == [1, 2]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=5) == [1, 2, 3, 4, 5]
    assert too_old([], {}, keep_jobs=0, keep_bytes=0) == []
