"""The trusted rank: generates inputs, knows the oracle, judges outputs, times the reference. Candidate code never runs here.

Inputs are generated into private memory (staging) and copied to the shared arena just before the candidate may use them (publish).
Every call of ``generate`` draws new contents from the run's secret, which only trusted ranks hold. Several cases may be open at a time,
each in a space of its own.

Nothing that a candidate can map ever holds an answer before the candidate has given its own: the oracle and the reference work in this
process's private memory, and an arena is cleared before it is handed out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate.correctness.jitter import compile_crowd, keep_busy
from peerlane.evaluate.correctness.judge import changed_names, compare_arguments, judge_output
from peerlane.evaluate.memory.arena import POISON, aligned, view
from peerlane.evaluate.memory.input_generation import Inputs
from peerlane.evaluate.memory.layouts import Layouts, find_layouts
from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.ranks.case_state import OpenCase, Snapshot
from peerlane.evaluate.ranks.rank import Rank
from peerlane.evaluate.ranks.timed_block import COPIES_RUNS, copies_us
from peerlane.problems.contract.judge import expected_leaves, same_bits, type_mismatch
from peerlane.problems.contract.tree import (
    Description,
    GroupRef,
    Tree,
    dtype_of,
    rebuild,
    resolve_groups,
    tensor_descriptions,
)
from peerlane.results.sanitize import one_line

_GATHERED_BYTES = 64 << 20  # of a rank's inputs, that oracles get from it at a time


class TrustedRank(Rank):
    """Serves the requests of the supervisor: a case is opened, generated, published, timed, its outputs collected and judged."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self._secret = ""
        self._mode = "eager"
        self._open: dict[str, OpenCase] = {}
        self._layouts: dict[tuple[int, str, int, float], Layouts] = {}
        self.serve("secret", "open_case", "generate_inputs", "publish_inputs", "prepare", "restore", "copies", "keep_busy", "margins")
        self.serve("collect", "discard", "checksum_output", "compare_checksum", "judge", "close_case")

    def secret(self, request: Message) -> dict[str, Any]:
        """Takes the run's secret, which seeds all inputs. ``arms`` in the answer: what candidates' ranks need and may not compile."""
        self._secret = request["secret"]
        if not self.place.has_gpus:
            return {"arms": {}}
        return {"arms": {"crowd": base64.b64encode(compile_crowd(self.device)).decode()}}

    def opened(self, request: Message) -> OpenCase:
        current = self._open.get(request["space"])
        if current is None:
            raise RuntimeError(f"no case is open in {request['space']}: expected open_case first")
        return current

    def open_case(self, request: Message) -> dict[str, Any]:
        """Lays out up to ``slots`` calls, as many as fit into ``most_bytes``. ``alone``: whatever else is open is closed before."""
        for space in [*reversed(self._open)] if request["alone"] else [request["space"]]:
            self.close_case({"space": space})
        problem, case = self.case_of(request)
        groups = self.groups(problem.process_groups(case))
        inputs = Inputs(problem, case, self.rank, self._secret, self.device)
        key = problem.id, case.key, request["slots"], request["most_bytes"]
        if key not in self._layouts:
            self._layouts = {known: found for known, found in self._layouts.items() if known[0] == problem.id}
            self._layouts[key] = find_layouts(inputs, request["slots"], request["most_bytes"], groups)
        current = self._open[request["space"]] = OpenCase(inputs, self._layouts[key], groups, self.memory_fd)
        self.freeze_objects()
        return {
            "arena": current.arena.handle,
            "arguments": current.layouts[self.rank],
            "outputs": current.output_layout,
            "output_base": current.input_bytes,
            "input_bytes": current.input_bytes,
            "output_bytes": current.output_bytes,
            "reference_s": self._layouts[key].reference_s,
            "groups": {name: [list(members) for members in groups_] for name, groups_ in problem.process_groups(case).items()},
        }

    def close_case(self, request: Message) -> dict[str, Any]:
        if (current := self._open.pop(request["space"], None)) is not None:
            self.block = None
            current.arena.close()
        self.give_back()
        return {}

    def generate_inputs(self, request: Message) -> dict[str, Any]:
        """New contents for the first ``len(kinds)`` slots, in private memory; ``kinds`` says which of them are integer draws."""
        self.opened(request).generate(request["block"], request["kinds"])
        self.synchronize()
        return {}

    def publish_inputs(self, request: Message) -> dict[str, Any]:
        """Copies the inputs of the first ``slots`` slots to the shared arena, and poisons the output regions with NaN bits. Renews the
        guard bands.
        """
        current = self.opened(request)
        end = current.private.end(request["slots"])
        current.arena.data[:end].copy_(current.staging[:end])
        current.outputs.fill_(POISON)
        current.guards.paint()
        self.synchronize()
        return {}

    def prepare(self, request: Message) -> dict[str, Any]:
        """Builds the reference's timed block in a launch mode."""
        current, self._mode = self.opened(request), request["mode"]
        return self.build_block(request, current.reference, current.private, current.private_outputs)

    def restore(self, request: Message) -> dict[str, Any]:
        """Undoes the swaps of the prepared block, behind each run of it."""
        private = self.opened(request).private
        for _, slot, other in reversed(self.prepared.plan.swaps):
            private.swapper(slot, other)()
        self.synchronize()
        return {}

    def copies(self, request: Message) -> dict[str, Any]:
        """What the swaps and output copies of the prepared block take alone."""
        current, plan = self.opened(request), self.prepared.plan
        us = copies_us(self._mode, current.reference, current.private, current.private_outputs, self.device, plan)
        for _ in range(COPIES_RUNS + 1):
            self.restore(request)
        return {"copies_us": us}

    def keep_busy(self, request: Message) -> dict[str, Any]:
        """Keeps this GPU busy for ``seconds``, beside whoever else uses it. Only the rank that shares its GPU gets more than 0."""
        keep_busy(request["seconds"])
        return {}

    def collect(self, request: Message) -> dict[str, Any]:
        """Copies the candidate's snapshots of ``slots`` out of the arena: whatever is written there afterwards comes too late.

        Their inputs are kept too, as they were generated for the slots ``contents``. ``outputs``: how the candidate's rank described what
        it returned. The arguments of the slots ``intact`` are compared with what was generated: nobody else has touched them since.
        Returns the bytes that wait for :meth:`judge`.
        """
        current = self.opened(request)
        for slot, source, described in zip(request["slots"], request["contents"], request["outputs"], strict=True):
            inputs = current.staging[current.spans(source)[self.rank]].clone()
            current.snapshots.append(Snapshot(slot, source, current.kinds[source], described, current.taken(slot), inputs))
            if slot in request["intact"]:
                current.changes += _changes(current, source, slot)
        self.synchronize()
        return {"bytes": sum(snapshot.nbytes for snapshot in current.snapshots)}

    def discard(self, request: Message) -> dict[str, Any]:
        """Forgets what was collected, of a race that was broken off."""
        current = self.opened(request)
        current.snapshots.clear()
        current.changes.clear()
        return {}

    def checksum_output(self, request: Message) -> dict[str, Any]:
        """Keeps the snapshot of one slot, whose outputs the candidate's rank is about to copy once more."""
        current = self.opened(request)
        current.checksummed = request["slot"], current.taken(request["slot"])
        self.synchronize()
        return {}

    def compare_checksum(self, request: Message) -> dict[str, Any]:
        """Compares the second copy of the remembered slot's outputs with the first: ``changed`` is the number of the first that differs."""
        current = self.opened(request)
        (slot, first), current.checksummed = current.checksummed, (0, [])
        pairs = enumerate(zip(first, current.taken(slot), strict=True))
        changed = next((number for number, (before, after) in pairs if before.numel() and not same_bits(before, after)), None)
        return {"changed": changed, "out_of_bounds": _out_of_bounds(current)}

    def judge(self, request: Message) -> dict[str, Any]:
        """Compares all collected snapshots with the oracle."""
        current, at_rest = self.opened(request), request["at_rest"]
        snapshots, current.snapshots = current.snapshots, []
        changes, current.changes = current.changes, []
        if at_rest:
            changes += [change for slot in range(len(current.kinds)) for change in _changes(current, slot, slot)]
        return {
            "slots": [
                self._judge(current, snapshot, inputs)
                for snapshot, inputs in zip(snapshots, self._all_inputs(current, snapshots), strict=True)
            ],
            "changed_arguments": changed_names(changes),
            "out_of_bounds": _out_of_bounds(current) if at_rest else None,
        }

    def _judge(self, current: OpenCase, snapshot: Snapshot, inputs: list[tuple[Any, ...]]) -> dict[str, Any]:
        problem, case, slot = current.problem, current.case, snapshot.slot
        expected = problem.oracle(case, inputs, self.rank)
        if (reason := _claimed_mismatch(snapshot.described, expected, self.device)) is not None:
            return {"slot": slot, "type": reason}
        got = rebuild(current.output_layout[slot], iter(snapshot.tensors), current.groups.__getitem__)
        if (mismatch := type_mismatch(got, expected)) is not None:
            raise RuntimeError(f"{case.key}: the reference and the oracle disagree about the output's type: {mismatch}")
        judged = judge_output(problem, case, got, expected, snapshot.kind)
        worst = judged.worst
        answer: dict[str, Any] = {
            "slot": slot,
            "ratio": worst.ratio,
            "output": worst.output,
            "detail": worst.detail,
            "index": worst.index,
            "got": worst.got,
            "want": worst.want,
        }
        if problem.replicated:
            answer["digests"] = list(judged.digests)
        return answer

    def _all_inputs(self, current: OpenCase, snapshots: list[Snapshot]) -> Iterator[list[tuple[Any, ...]]]:
        """For one snapshot after the other the call's arguments on every rank, for the oracle; process groups stay references by name."""
        widths = [aligned(max(1, *(span.stop - span.start for span in current.spans(snapshot.source)))) for snapshot in snapshots]
        begin = 0
        while begin < len(snapshots):
            end, offsets = begin, [0]
            while end < len(snapshots) and (end == begin or offsets[-1] + widths[end] <= _GATHERED_BYTES):
                offsets.append(offsets[-1] + widths[end])
                end += 1
            own = torch.empty(offsets[-1], dtype=torch.uint8, device=self.device)
            for snapshot, offset in zip(snapshots[begin:end], offsets, strict=False):
                own[offset : offset + snapshot.inputs.numel()] = snapshot.inputs
            everyone = own.new_empty(self.world_size * own.numel())
            dist.all_gather_into_tensor(everyone, own)
            for snapshot, offset in zip(snapshots[begin:end], offsets, strict=False):
                yield [
                    self._arguments(layout[snapshot.source], data[offset:], span.start)
                    for layout, data, span in zip(
                        current.layouts, everyone.chunk(self.world_size), current.spans(snapshot.source), strict=True
                    )
                ]
            begin = end

    @staticmethod
    def _arguments(layout: Description, data: torch.Tensor, start: int) -> tuple[Any, ...]:
        """The arguments of one call; ``data`` begins with what lies at ``start`` in the rank's memory."""
        tensors = [view(data, {**placed, "offset": placed["offset"] - start}) for placed in tensor_descriptions(layout)]
        return tuple(rebuild(layout, iter(tensors), GroupRef))

    def margins(self, request: Message) -> dict[str, Any]:
        """This rank's margins of a case (see :mod:`peerlane.problems.contract.calibration`): the reference, alternative solutions and
        wrong answers."""
        from peerlane.problems.contract.calibration import margins  # brings Triton along, which ranks that time things are better without

        problem, case = self.case_of(request)
        groups = self.groups(problem.process_groups(case))

        def resolve(tree: Tree) -> Tree:
            return resolve_groups(tree, groups.__getitem__)

        found = margins(problem, case, self.rank, secret=self._secret, resolve=resolve, device=self.device)
        if self.place.has_gpus:
            torch.cuda.empty_cache()
        return {"margins": asdict(found)}


def _changes(current: OpenCase, source: int, slot: int) -> list[tuple[str, torch.Tensor]]:
    """The parameters that a call may not change, and whether ``slot`` does not hold in the arena what was generated for ``source``."""
    return compare_arguments(current.problem, current.private.args[source], current.public.args[slot])


def _out_of_bounds(current: OpenCase) -> dict[str, Any] | None:
    """Where something was written that belongs to no tensor, if anywhere."""
    found = current.guards.out_of_bounds()
    if found is None:
        return None
    region, distance = found
    place = f"{distance} bytes behind its end" if distance >= 0 else f"{-distance} bytes before its begin"
    return {"slot": region.slot, "name": region.name, "place": place}


def _claimed_mismatch(described: Any, expected: Tree, device: torch.device) -> str | None:
    """Why what a candidate's rank described, which says what it likes, has not the expected structure, shapes, dtypes and devices."""
    try:
        if (other := next(_others(described), None)) is not None:
            return one_line(f"output holds a {other}, expected a plain tensor on the rank's device")
        tensors = list(tensor_descriptions(described))
        claimed = rebuild(described, iter([torch.empty(d["shape"], dtype=dtype_of(d["dtype"]), device="meta") for d in tensors]), str)
        if (reason := type_mismatch(claimed, expected)) is not None:
            return one_line(reason)
        for leaf, tensor in zip(expected_leaves(expected), tensors, strict=True):
            if device.type != "cpu" and bool(tensor.get("host")) != leaf.host:
                places = ("on the rank's device", "in host memory")
                return f"{leaf.name}: got a tensor {places[not leaf.host]}, expected it {places[leaf.host]}"
    except Exception as error:
        return one_line(f"the output's description is not valid: {type(error).__name__}: {error}")
    return None


def _others(described: Description) -> Any:
    if described["kind"] == "other":
        yield described["type"]
    for item in described.get("items", ()):
        yield from _others(item)
