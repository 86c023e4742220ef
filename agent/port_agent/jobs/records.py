"""Records of jobs on disk: numbered in the order of writing, and sealed with a checksum.

A row of the database and a manifest hold the same record; the later one counts. Unsealed records of older agents are
accepted, and older agents ignore the two fields.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from port_agent.jobs.job import Job, check_spec, from_record, to_record
from port_agent.system.checksum import values_checksum
from port_planner.base.errors import PortError

_WRITTEN, _SEAL = "written", "seal"


class DamagedRecordError(PortError):
    """A record differs from what was written."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record whose checksum is right; whether this agent understands it is another question."""

    id: int
    written: int
    """Number of the write, which grows with each write of the store; 0 if the agent did not number its writes."""
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The job's name, as far as the record is readable."""
        spec = self.fields.get("spec")
        return str(spec.get("name", "")) if isinstance(spec, dict) else ""

    def job(self) -> Job:
        """Return the job; raises JobRequestError when this agent cannot restore or run it."""
        job = from_record(self.fields)
        check_spec(job.spec)
        return job


def seal(job: Job, written: int) -> str:
    """Return the sealed record of a job; `written` is the number of the store's write."""
    record = {**to_record(job), _WRITTEN: written}
    return json.dumps({**record, _SEAL: values_checksum(record)})


def unseal(text: bytes) -> StoredRecord:
    """Return the record that `seal` sealed; raises DamagedRecordError if it was changed."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"the record is damaged: {error}") from error
    if not isinstance(record, dict) or type(record.get("id")) is not int:
        raise DamagedRecordError("the record is damaged: it names no job")
    expected = record.pop(_SEAL, None)
    if expected is not None and expected != values_checksum(record):
        raise DamagedRecordError(
            f"the record is damaged: its checksum is {values_checksum(record)} instead of {expected!r}"
        )
    written = record.pop(_WRITTEN, 0)
    return StoredRecord(record["id"], written if type(written) is int else 0, record)
