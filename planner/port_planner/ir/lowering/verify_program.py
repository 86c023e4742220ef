"""Follow a program without running it: each instruction's inputs must exist in the expected form.

It knows what an executor does with each instruction, but not how the program was created.
"""

from collections.abc import Set

from port_planner.ir.graph import Role, operands
from port_planner.ir.lowering.packables import packed_reading
from port_planner.ir.lowering.rematerialize import effective_operands
from port_planner.ir.program import Code, Instruction, PlanError, Program


def verify_lowered(program: Program) -> None:
    """Raise PlanError, with the instruction's number, unless each instruction finds its inputs and
    the step ends as it began.
    """
    machine = _Machine(program)
    for number, instruction in enumerate(program.instructions):
        wrong = machine.obey(instruction)
        if wrong:
            raise PlanError(
                f"instruction {number} ({instruction.code.name} {instruction.index}) of the program: {wrong}; "
                "the lowering is wrong, report this"
            )
    wrong = machine.left()
    if wrong:
        raise PlanError(f"the program ends with {wrong}; the lowering is wrong, report this")


class _Machine:
    """The place of each storage: whole in RAM, packed there, on a paging target, or in transfer."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.lasting = {s for s, x in enumerate(self.graph.storages) if x.persistent and self.graph.uses[s]}
        self.whole = {
            s
            for s, x in enumerate(self.graph.storages)
            if x.role is not Role.TEMPORARY and self.graph.uses[s] and s not in program.starts_away
        }
        self.away = set(program.starts_away)
        self.leaving, self.landing = set(program.cross_step), set[int]()
        self.made: set[int] = set()
        self.packed: dict[int, int] = {}
        """Storage -> the entry of its packed form, if that is in RAM."""
        self.packed_away: set[int] = set()
        self.packed_leaving, self.packed_landing = set[int](), set[int]()
        self.come_back = {x.index for x in program.instructions if x.code is Code.UNPACK}
        self.updating: set[int] = set()

    def obey(self, instruction: Instruction) -> str:
        """Execute an instruction symbolically; return the problem, or ""."""
        i = instruction.index
        match instruction.code:
            case Code.RUN:
                return self._run(i)
            case Code.RERUN:
                return self._rerun(i)
            case Code.FREE:
                return self._free(i)
            case Code.WRITE | Code.WAIT_WRITE | Code.READ | Code.WAIT_READ:
                return self._page(instruction.code, i)
            case Code.SLICED | Code.WAIT_SLICED:
                return self._update(instruction.code, i)
            case _:
                return self._pack(instruction.code, i)

    def left(self) -> str:
        """Return the storages that remain at the end but should not, or are missing."""
        pending = self.landing | self.packed_landing | self.packed_leaving | self.updating
        if pending or not self.leaving <= self.program.cross_step:
            return "transfers or updates in progress that nothing waits for"
        if self.packed or self.packed_away:
            return f"storages {sorted({*self.packed, *(self.program.packings[entry].storage for entry in self.packed_away)})} still packed"
        if self.whole & self.lasting != self.lasting - self.program.starts_away:
            return f"storages {sorted((self.whole & self.lasting) ^ (self.lasting - self.program.starts_away))} not where they began"
        if not self.program.starts_away <= self.away:
            return f"storages {sorted(self.program.starts_away - self.away)} changed since they were written"
        if not self.graph.kept <= self.whole:
            return f"results {sorted(self.graph.kept - self.whole)} gone"
        return ""

    def _disturbed(self, touched: Set[int], changed: Set[int]) -> str:
        """Return the pending update that changes a touched storage, or touches a changed one."""
        for g in self.updating:
            ops = range(self.program.groups[g].first, self.program.groups[g].last + 1)
            writes = {w for k in ops for w in self.graph.ops[k].writes}
            uses = writes | {s for k in ops for s in (*self.graph.reads[k], *self.graph.creates[k])}
            if touched & writes or changed & uses:
                return f"update {g} is still at storages {sorted((touched & writes) | (changed & uses))}"
        return ""

    def _run(self, i: int) -> str:
        op = self.graph.ops[i]
        needed = {self.graph.values[v].storage for v in operands(op)}
        for s in needed - self.whole:
            entry = self.packed.get(s)
            if entry is None or entry in self.come_back:
                return f"{op.name} reads storage {s} ({self.graph.label(s)}), which is not resident"
            if packed_reading(self.graph, op, s, self.program.packings[entry].codec) is None:
                return f"{op.name} reads storage {s} ({self.graph.label(s)}), which is packed, whole"
        made = set(self.graph.creates[i])
        self.whole |= made
        self.made |= made
        self.away -= set(op.writes)
        return self._disturbed(needed, set(op.writes))

    def _rerun(self, i: int) -> str:
        needed, made = set(effective_operands(self.graph, i)), set(self.graph.creates[i])
        if not needed <= self.whole:
            return f"{self.graph.ops[i].name} reads storages {sorted(needed - self.whole)}, which are not resident"
        if not made <= self.made:
            return f"storages {sorted(made - self.made)} are made again before they were made"
        self.whole |= made
        return self._disturbed(needed, set())

    def _free(self, s: int) -> str:
        if s in self.whole:
            self.whole.discard(s)
        elif self.packed.pop(s, None) is None:
            return f"storage {s} is not resident"
        return self._disturbed(set(), {s})

    def _page(self, code: Code, s: int) -> str:
        wrong = ""
        match code:
            case Code.WRITE:
                wrong = "" if s in self.whole and s not in self.leaving else f"storage {s} is not there to be written"
                self.whole.discard(s)
                self.leaving.add(s)
                self.away.add(s)
            case Code.WAIT_WRITE:
                wrong = "" if s in self.leaving | self.program.cross_step else f"storage {s} is not being written"
                self.leaving.discard(s)
                return wrong
            case Code.READ:
                wrong = "" if s in self.away and s not in self.whole | self.landing else f"storage {s} is not paged"
                self.landing.add(s)
            case _:
                wrong = "" if s in self.landing else f"storage {s} is not being read"
                self.landing.discard(s)
                self.whole.add(s)
                return wrong
        return wrong or self._disturbed(set(), {s})

    def _update(self, code: Code, g: int) -> str:
        group = self.program.groups[g]
        if code is Code.WAIT_SLICED:
            if g not in self.updating:
                return f"update {g} is not under way"
            self.updating.discard(g)
            self.away |= set(dict(self.program.slice_written).get(g, ()))
            return ""
        gone = {s for s in group.storages if s not in self.whole | self.away and s not in group.temporaries}
        for k in range(group.first, group.last + 1):
            self.whole |= set(self.graph.creates[k]) - set(group.temporaries)
            self.away -= {s for s in self.graph.ops[k].writes if s in self.whole}
        self.updating.add(g)
        return f"storages {sorted(gone)} are neither resident nor away" if gone else ""

    def _pack(self, code: Code, entry: int) -> str:
        s = self.program.packings[entry].storage
        in_ram = self.packed.get(s) == entry
        match code:
            case Code.PACK:
                wrong = s not in self.whole or s in self.packed
                self.whole.discard(s)
                self.packed[s] = entry
                return f"storage {s} is not there to be packed" if wrong else self._disturbed({s}, {s})
            case Code.UNPACK:
                wrong = not in_ram or s in self.whole
                self.packed.pop(s, None)
                self.whole.add(s)
            case Code.WRITE_PACKED:
                wrong = not in_ram
                self.packed.pop(s, None)
                self.packed_leaving.add(entry)
                self.packed_away.add(entry)
            case Code.WAIT_WRITE_PACKED:
                wrong = entry not in self.packed_leaving
                self.packed_leaving.discard(entry)
            case Code.READ_PACKED:
                wrong = entry not in self.packed_away
                self.packed_away.discard(entry)
                self.packed_landing.add(entry)
            case _:
                wrong = entry not in self.packed_landing
                self.packed_landing.discard(entry)
                self.packed[s] = entry
        return f"the packed form of storage {s} is not where it is taken from" if wrong else ""
