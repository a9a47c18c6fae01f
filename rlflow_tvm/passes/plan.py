"""Plans: a search's result as a file, replayed without measuring anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow_tvm.errors import PlanError
from rlflow_tvm.passes.files import read_whole, write_whole

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Rewrite actions (`rule@site`) and the structural hashes of the module before the first and after the last.

    `lanes` is the vector width that the rule set was made for; replaying needs the same.
    """

    actions: tuple[str, ...]
    start_hash: int
    end_hash: int
    lanes: int

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Plan:
        """The plan that `dataclasses.asdict` made `fields` of, JSON in between or not."""
        return Plan(**{**fields, "actions": tuple(fields["actions"])})

    def __len__(self) -> int:
        return len(self.actions)

    def check_start(self, structural_hash: int) -> None:
        if structural_hash != self.start_hash:
            raise PlanError(
                f"the plan is for another module (structure {self.start_hash:016x}, this one is "
                f"{structural_hash:016x}): use the model and shapes it was made for, or search again"
            )

    def check_lanes(self, lanes: int) -> None:
        if lanes != self.lanes:
            raise PlanError(
                f"the plan is for {self.lanes} vector lanes, the rule set for {lanes}: "
                f"use default_rules({self.lanes}), or search again for this target"
            )

    def check_end(self, structural_hash: int) -> None:
        if structural_hash != self.end_hash:
            raise PlanError(
                f"replaying the plan gave structure {structural_hash:016x} instead of {self.end_hash:016x}: "
                "the rules have changed since; search again"
            )

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically."""
        fields = {
            "start_hash": f"{self.start_hash:016x}",
            "end_hash": f"{self.end_hash:016x}",
            "lanes": self.lanes,
            "actions": list(self.actions),
        }
        write_whole(Path(path), FORMAT, fields, "plan")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; PlanError names the file and what is wrong with it."""
        data = read_whole(Path(path), FORMAT, "plan", "search again")
        try:
            actions = data["actions"]
            if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
                raise TypeError("actions is no list of texts")
            lanes = data["lanes"]
            if type(lanes) is not int or lanes < 1:  # neither true, which is an int too, nor 2.9
                raise TypeError("lanes is no number of vector lanes")
            return Plan(tuple(actions), int(data["start_hash"], 16), int(data["end_hash"], 16), lanes)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{path}: damaged plan file ({type(error).__name__}: {error})") from None
