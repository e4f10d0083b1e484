"""Requests of the supervisor to ranks: an interface for each kind of rank, whose abstract methods are the requests.

The supervisor sends ``Request(TrustedInterface.undo_swaps, space)``, see :mod:`peerlane.evaluate.messages`. The classes of the same kinds
in ``ranks/`` carry requests out. Standard library only: rank processes import this module."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from peerlane.errors import ProtocolError
from peerlane.evaluate import wire
from peerlane.evaluate.messages import Arguments, Interface, declare

# --- checks of an answer against its request ---


def _must_be(number: int, items: Sequence[Any], what: str = "descriptions of outputs") -> None:
    if len(items) != number:
        raise ProtocolError(f"expected {number} {what}, got {len(items)}")


def _must_have_events(timeline: bool, recordings: Iterable[wire.Recording]) -> None:
    if any((recording.events is not None) != timeline for recording in recordings):
        raise ProtocolError(f"expected recordings {'with' if timeline else 'without'} the events of a timeline")


def _check_called(asked: Arguments, answer: wire.Called) -> None:
    _must_be(len(asked["slots"]), answer.outputs)
    _must_be(0 if asked["marker"] is None else len(asked["slots"]), answer.recordings, "recordings")
    _must_have_events(asked["timeline"], answer.recordings)


def _check_profiled(asked: Arguments, answer: wire.ProfiledBlock) -> None:
    _must_be(asked["slots"], answer.outputs)
    _must_have_events(asked["timeline"], [answer.recording])


# --- interfaces ---


class RankInterface(Interface, ABC):
    """Requests that every rank process serves."""

    @abstractmethod
    def initialize(self) -> wire.Count:
        """Joins the process group, where there is one, and runs one collective, so that connections exist. Returns the process's number."""

    @abstractmethod
    def exit(self) -> None:
        """Ends the process after its answer."""


class BlockInterface(RankInterface):
    """Requests to ranks that have a device and time blocks."""

    @abstractmethod
    def export_arena(self) -> wire.ExportedArena:
        """Creates a small arena with a random byte in it, for another process to map."""

    @abstractmethod
    def import_arena(self, arena: dict[str, Any]) -> wire.Count:
        """Maps an arena that another rank exported; returns its first byte."""

    @abstractmethod
    def use_device(self) -> None:
        """Runs a small kernel, to see whether the device works."""

    @abstractmethod
    def prepare_block(self, space: str, mode: wire.LaunchMode, side: wire.Side, plan: wire.BlockPlan) -> str | None:
        """Builds a timed block; for graphs this captures its calls. Trusted ranks have the reference alone. Returns why the calls could not
        be captured; None if the block is ready."""

    @abstractmethod
    def warm_up_block(self) -> None:
        """Runs the prepared block once, without clocks."""

    @abstractmethod
    def ready_block(self, core: int) -> None:
        """Makes the rank ready to run the prepared block: on this core, with no garbage, idle devices and a cold cache."""

    @abstractmethod
    def run_block(self) -> wire.BlockRun:
        """Runs the prepared block between two events; as little as possible besides, for the supervisor's clock runs meanwhile."""


class TrustedInterface(BlockInterface):
    """Requests to trusted ranks."""

    @abstractmethod
    def take_secret(self, secret: str) -> str:
        """Takes the run's secret, which seeds all inputs. Returns the kernel that candidates' ranks hold SMs with, which they may not
        compile, in base 64; empty on CPUs."""

    @abstractmethod
    def open_case(self, space: str, case_id: wire.CaseId, slots: int, most_bytes: float, alone: bool) -> wire.OpenedCase:
        """Lays out up to ``slots`` calls of a case, as many as fit into ``most_bytes``. ``alone``: whatever else is open is closed
        before."""

    @abstractmethod
    def close_case(self, space: str) -> None:
        """Frees a case's memory."""

    @abstractmethod
    def generate_inputs(self, space: str, block: int, kinds: list[str]) -> None:
        """Draws new contents for the first ``len(kinds)`` slots, in private memory; ``kinds`` says which of them are integer draws."""

    @abstractmethod
    def publish_inputs(self, space: str, slots: int) -> None:
        """Copies the inputs of the first ``slots`` slots to the shared arena, and poisons the output regions with NaN bits. Renews the
        guard bands."""

    @abstractmethod
    def undo_swaps(self, space: str) -> None:
        """Undoes the swaps of the prepared block, after a run of it."""

    @abstractmethod
    def time_copies(self, space: str) -> wire.CopiesTime:
        """Times the swaps and output copies of the prepared block without its calls."""

    @abstractmethod
    def keep_device_busy(self, seconds: float) -> None:
        """Keeps the rank's GPU busy for ``seconds``, beside whoever else uses it."""

    @abstractmethod
    def collect_outputs(self, space: str, slots: list[int], contents: list[int], outputs: wire.Outputs, intact: list[int]) -> int:
        """Copies the candidate's snapshots of ``slots`` out of the arena: whatever is written there afterwards comes too late.

        Their inputs are kept too, as they were generated for the slots ``contents``. ``outputs`` describes what the candidate's calls
        returned. The arguments of the slots ``intact`` are compared with what was generated: nobody else has touched them since. Returns
        the bytes that wait for :meth:`judge_outputs`."""

    @abstractmethod
    def discard_outputs(self, space: str) -> None:
        """Forgets the outputs that were collected."""

    @abstractmethod
    def judge_outputs(self, space: str, at_rest: bool, judges: list[int]) -> wire.Judgement:
        """Compares all collected outputs with the oracle. ``at_rest``: the candidate alone has touched the inputs since they were
        published. ``judges``: for each of them the one rank whose output is compared; empty: those of all ranks are."""

    @abstractmethod
    def save_output(self, space: str, slot: int) -> None:
        """Keeps a copy of one slot's outputs, which the candidate's ranks are about to copy once more."""

    @abstractmethod
    def compare_output(self, space: str) -> wire.OutputComparison:
        """Compares the saved outputs with what lies in their slot now."""

    @abstractmethod
    def measure_margins(self, case_id: wire.CaseId) -> dict[str, Any]:
        """Measures how far reference, alternative solutions and known wrong answers are from the tolerance. Returns the fields of
        :class:`peerlane.problems.contract.calibration.Margins`."""


class LoadingInterface(RankInterface):
    """Requests to ranks that load a candidate, emulated or not."""

    @abstractmethod
    def attach_case(self, space: str, problem: int, variant: str, layout: wire.CaseLayout) -> None:
        """Maps a case that the trusted ranks have laid out."""

    @abstractmethod
    def detach_case(self, space: str) -> None:
        """Unmaps a case's memory, because the trusted side is about to lay it out anew."""

    @abstractmethod
    @declare(failure_kind="import_error")
    def load_candidate(self, path: str, source: str, cache: str | None, problem: int, variant: str, granted: dict[str, str]) -> None:
        """Imports the candidate's ``source``, which was at ``path``. ``cache``: the folder of its own builds. ``granted``: sources of the
        solutions that it may import, by module."""


class CandidateInterface(BlockInterface, LoadingInterface):
    """Requests to a candidate's ranks. What they answer is untrusted."""

    @abstractmethod
    def load_sm_holder(self, code: str) -> None:
        """Loads the kernel that holds SMs under stress, in base 64, before candidate code is there."""

    @abstractmethod
    def load_reference(self, problem: int, variant: str) -> None:
        """Takes the reference for the candidate."""

    @abstractmethod
    @declare(check=_check_called)
    def call(self, space: str, side: wire.Side, slots: list[int], marker: str | None = None, timeline: bool = False) -> wire.Called:
        """Calls a side on ``slots``, one after the other, at rest. With a ``marker`` calls are recorded, with ``timeline`` event by
        event."""

    @abstractmethod
    @declare(check=lambda asked, outputs: _must_be(len(asked["order"]), outputs))
    def call_under_stress(
        self,
        space: str,
        order: list[int],
        jitter: list[tuple[int, str, float]],
        poisoned: list[int],
        kept: list[int],
        swaps: tuple[tuple[int, int, int], ...],
    ) -> wire.Outputs:
        """Calls the candidate on the slots in ``order``, which are the first ``len(order)``, with no wait between the calls.

        ``jitter`` lists (position, way, us): what happens before which call. ``poisoned``: the positions before which freed memory is
        filled with NaN; ``kept``: those whose inputs are left as they are after the call. ``swaps``: steps of :class:`SlotSwaps`."""

    @abstractmethod
    @declare(check=lambda asked, outputs: _must_be(asked["slots"], outputs))
    def describe_outputs(self, space: str, slots: int) -> wire.Outputs:
        """Describes what the calls of the latest block returned for the first ``slots`` slots, slot by slot."""

    @abstractmethod
    def recopy_output(self, space: str, slot: int) -> None:
        """Copies what the latest call returned into its region once more: it may not have changed since."""

    @abstractmethod
    @declare(check=_check_profiled)
    def profile_block(self, space: str, slots: int, marker: str, timeline: bool) -> wire.ProfiledBlock:
        """Runs the prepared block under the profiler, without clocks, and describes the outputs of its ``slots`` slots. Ranks begin a
        ``timeline`` together."""

    @abstractmethod
    def list_loaded_code(self, libraries: bool) -> wire.LoadedCode:
        """Lists the device code that was loaded since the candidate's import. ``libraries``: those it added are disassembled, which is
        slow."""

    @abstractmethod
    def probe_profiler(self, marker: str) -> wire.Recording:
        """Records a kernel of PyTorch's, to see whether the profiler works here."""

    @abstractmethod
    def list_connections(self) -> Annotated[list[wire.Connection], wire.at_most(wire.MOST_NAMES)]:
        """Lists the process's TCP connections, with the bytes that they have received."""


class EmulatedInterface(LoadingInterface):
    """Requests to the process of a candidate's emulated ranks alone. It serves :meth:`CandidateInterface.call`, too, for all ranks at
    once."""

    @abstractmethod
    def report_races(self) -> wire.RaceReport:
        """Reports what the emulator has found in the launches since the last report, under many schedules, and how often each kernel was
        launched in all. Later calls on this case are run for their results alone, each launch under a schedule of its own."""


class BuilderInterface(RankInterface):
    """Requests to builders."""

    @abstractmethod
    @declare(failure_kind="import_error")
    def build_candidate(
        self, path: str, source: str, cache: str | None, granted: dict[str, str], on_cpu: bool, gpu_only: bool, emulated: bool
    ) -> wire.Built:
        """Imports the candidate, and compiles what its source shows that it will compile when it is called.

        Compiler errors of the import are raised; anything else is left to the ranks, where it may well work. With ``gpu_only`` no rank of
        this run will import it: all errors are raised, but for those that a GPU or a CUDA build of torch would mend. ``emulated``: its
        ranks are emulated, so extensions are built for the emulator.
        """
