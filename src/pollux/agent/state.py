"""Everything that training goes on from: written to checkpoints, and given to replicas that join.

model.pt, optimizer.pt, scaler.pt     the state_dicts of the user's objects
scheduler.pt                          the schedule's under "inner", and how far it has counted
training.pt                           cursor, progress, noise, batch size, profile, random states
user.pt                               averages, registered objects, job.state
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pollux.agent.dealing import Cursor
from pollux.agent.metrics import Averages, AverageState
from pollux.agent.options import Options
from pollux.agent.parts import Parts
from pollux.agent.place import Place
from pollux.agent.schedule import Turn
from pollux.agent.snapshot import checked
from pollux.errors import InvalidSpec, LoopMisuse


class TrainingState:
    """The state of a prepared job: taken apart for others, and put back."""

    def __init__(self, options: Options, averages: Averages, user: dict[str, Any]) -> None:
        self._options = options
        self._prepared: Parts | None = None
        self._averages = averages
        self._user = user
        self._registered: dict[str, Any] = {}
        self._restored_objects: Mapping[str, Any] = {}
        self.place = Place()
        """Where in the script's loops the job is."""
        self.merged_averages: Mapping[str, AverageState] | None = None
        """Those of all members, on a replica that leaves and hands them over."""

    def prepared(self, parts: Parts) -> None:
        self._prepared = parts

    @property
    def _parts(self) -> Parts:
        assert self._prepared is not None
        return self._prepared

    @property
    def step(self) -> int:
        return self._parts.dealer.committed.step

    @property
    def is_inside(self) -> bool:
        return self._parts.loop.is_inside

    # Taken apart

    def full(self) -> dict[str, Any]:
        """For a replica that joins; its averages start at nothing, unless this one leaves them behind."""
        nothing = {name: AverageState(sum=0.0, count=0.0) for name in self._averages.state_dict()}
        state = self.parts(self.merged_averages or nothing)
        state["trainable"] = [parameter.requires_grad for parameter in self._parts.given.model.parameters()]
        return state

    def small(self) -> dict[str, Any]:
        """What members that are equally far may disagree on, after one of them was lost.

        Not the schedule: a script may have stepped it between two sums of which another member has seen only the first.
        """
        return {"training": self._training()}

    def parts(self, averages: Mapping[str, AverageState]) -> dict[str, Any]:
        """All of it, by the file of a checkpoint that it goes to."""
        made = self._parts
        state: dict[str, Any] = {
            "training": self._training(),
            "model": made.model.state_dict(),
            "optimizer": made.given.optimizer.state_dict(),
            "user": {
                "averages": averages,
                "registered": {name: holder.state_dict() for name, holder in self._registered.items()},
                "state": self._user,
            },
        }
        if made.schedule is not None:
            state["scheduler"] = made.schedule.state_dict()
        if made.scaler is not None:
            state["scaler"] = made.scaler.inner.state_dict()
        return state

    def _training(self) -> dict[str, Any]:
        made = self._parts
        return {
            "adapter": made.adapter.state(),
            "cursor": dataclasses.asdict(made.dealer.committed),
            "place": dataclasses.asdict(self.place),
            "random": random_states(made.replicas.device),
            "is_inside": made.loop.is_inside,
            "replicas": made.dealer.num_replicas,
            "is_stopped": made.loop.is_stopped,
            "seed": self._options.seed,
            "initial_batch_size": made.adapter.initial_batch_size,
            "pass_length": made.dealer.pass_length,
            "turn": made.loop.turn.number,
            "turn_start": made.loop.turn.start,
        }

    def check_user_state(self) -> None:
        """Better now than with the first checkpoint."""
        checked(self._user, 'user["state"]')

    def facts(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of it."""
        made, place = self._parts, self.place
        return {
            "progress": made.adapter.progress,
            "batch_size": made.dealer.config.batch_size,
            "replicas": made.replicas.size,
            "pass": made.dealer.committed.pass_index,
            "finished": place.is_finished,
        }

    # Put back

    def resume(self, parts: Mapping[str, Any], origin: str, *, is_main: bool) -> None:
        """Go on from a checkpoint."""
        self._load_all(parts, f"{origin} was made with", "another checkpoint_dir to start afresh")
        self._parts.adapter.load(parts["training"]["adapter"], keeps_given_config=True)
        self._averages.load_state_dict(parts["user"]["averages"], is_main)
        # The loop is entered once more, and counts that as a turn.
        self._parts.loop.turn = self._parts.loop.turn._replace(number=parts["training"]["turn"])

    def join(self, parts: Mapping[str, Any], *, is_main: bool) -> None:
        """Go on as a member, from what another one gave."""
        self._user.clear()
        self._load_all(parts, "the replicas that train have", "let every replica see the same data and options")
        self._parts.adapter.load(parts["training"]["adapter"], keeps_given_config=False)
        for name, average in parts["user"]["averages"].items():
            mean = average["sum"] / average["count"] if average["count"] else 0.0
            # What this replica has counted stays; of one that leaves, the first takes over what it had.
            self._averages[name].add(mean, average["count"] if is_main else 0)
        for parameter, is_trainable in zip(self._parts.given.model.parameters(), parts["trainable"], strict=True):
            parameter.requires_grad_(is_trainable)
        training = parts["training"]
        turn = Turn(training["turn"], training["turn_start"], training["turn_start"])
        loop = self._parts.loop
        if not training["is_inside"]:
            loop.turn = turn
        elif not loop.is_inside:
            loop.joined_turn = turn

    def agree(self, state: Mapping[str, Any]) -> None:
        """Take over what members may disagree on."""
        self._load_training(state["training"])
        self._parts.adapter.load(state["training"]["adapter"], keeps_given_config=False)

    def _load_all(self, parts: Mapping[str, Any], origin: str, way_out: str) -> None:
        made, training = self._parts, parts["training"]
        own = {
            "seed": self._options.seed,
            "initial_batch_size": made.adapter.initial_batch_size,
            "pass_length": made.dealer.pass_length,
        }
        for name, given in own.items():
            _check_same(origin, name, training[name], given, way_out)
        made.given.model.load_state_dict(parts["model"])
        made.given.optimizer.load_state_dict(parts["optimizer"])
        self._load_training(training)
        if made.schedule is not None and "scheduler" in parts:
            made.schedule.load_state_dict(parts["scheduler"])
        if made.scaler is not None and "scaler" in parts:
            made.scaler.inner.load_state_dict(parts["scaler"])
        self._user.update(parts["user"]["state"])
        self._restored_objects = parts["user"]["registered"]
        for name, holder in self._registered.items():
            self._restore(name, holder)

    def _load_training(self, training: Mapping[str, Any]) -> None:
        made = self._parts
        made.dealer.resume(Cursor(**training["cursor"]))
        made.loop.is_stopped = training.get("is_stopped", False)

    def register(self, name: str, holder: Any) -> None:
        """Keep anything with `state_dict` and `load_state_dict`, restored if the state that was loaded has it."""
        if name in self._registered:
            raise LoopMisuse(f"job.register was given {name!r} twice", "Use one name for each object")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(holder, method, None)):
                raise InvalidSpec(name, type(holder).__name__, f"has no {method}", "Put plain values into job.state")
        self._registered[name] = holder
        self._restore(name, holder)

    def _restore(self, name: str, holder: Any) -> None:
        if name in self._restored_objects:
            holder.load_state_dict(self._restored_objects[name])


def _check_same(origin: str, name: str, theirs: object, given: object, way_out: str) -> None:
    if theirs != given:
        raise InvalidSpec(
            name,
            given,
            f"{origin} {theirs!r}, and progress and the order of samples follow from that",
            f"Use {theirs!r} again, or {way_out}",
        )


def random_states(device: torch.device) -> dict[str, Any]:
    """Where the global random sources of this replica stand."""
    numpy_state = np.random.get_state(legacy=True)  # noqa: NPY002 - what datasets and scripts draw from
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": tuple(numpy_state),
    }


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
