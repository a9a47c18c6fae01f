"""A rollout worker's side: an environment and a policy in a process of their own, which collect episodes when asked.

Requests and answers are messages (see `messages`) with an "op":
- "start": `factory`, `arguments`, `config`, `seed`, `policy`: once, first; answered with the sizes of the observations
- "load": the policy's tensors; not answered
- "episode": `number`, `opening` as JSON; answered with the episode
An answer may be {"error": ...} instead, one line that a user can mend, or {"bug": ...}, a traceback.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import select
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import torch

from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.designs import DESIGNS
from rlflow_tvm.agents.messages import pack, pack_episode, unpack
from rlflow_tvm.agents.opening import Opening
from rlflow_tvm.agents.ppo import load_policy_tensors
from rlflow_tvm.errors import AgentError, RlflowError


class RolloutWorker:
    """Answers the requests of one training."""

    _env: gymnasium.Env | None = None

    def handle(self, request: bytes) -> bytes:
        """The answer to a request; empty where there is none."""
        try:
            message, tensors = unpack(request)
            if message["op"] == "start":
                return self._start(message)
            if message["op"] == "load":
                self._loaded = False
                load_policy_tensors(self._policy, tensors)
                self._loaded = True
                return b""
            if not self._loaded or self._env is None:  # the error was an answer that nobody waits for
                raise AgentError("workers: the policy does not fit theirs; use the same rlflow_tvm on all machines")
            rng = episode_rng(self._seed, message["number"])
            opening = Opening(**message["opening"])
            return pack_episode(collect_episode(self._env, self._policy, rng, opening=opening))
        except RlflowError as error:
            return self._given_up({"error": str(error)})
        except Exception:  # noqa: BLE001  process boundary: the training raises it
            return self._given_up({"bug": traceback.format_exc()})

    def _given_up(self, answer: Mapping[str, Any]) -> bytes:
        """The last answer, which ends the training. In the middle of an episode the environment holds locks, which the
        training may wait for before it hears of it."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
        return pack(answer)

    def _start(self, message: Mapping[str, Any]) -> bytes:
        design = DESIGNS[message["policy"]]
        config = design.config.from_dict(message["config"])
        torch.set_num_threads(config.threads)  # as where there are no workers, for the same numbers
        self._seed = int(message["seed"])
        self._env = make_env(message["factory"], message["arguments"])
        sizes = design.from_space(self._env.observation_space)
        self._policy, self._loaded = design.make(sizes, config), False
        return pack({"sizes": dataclasses.asdict(sizes)})


def make_env(factory: str, arguments: Mapping[str, Any]) -> gymnasium.Env:
    """The environment that `factory`, "module:function", makes of JSON arguments; AgentError where there is none."""
    module, _, name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise AgentError(
            f'environment factory {factory!r}: {error}; give "module:function", importable in a new process'
        ) from error
    return function(**arguments)


def serve(descriptor: int) -> None:
    """Answer the requests that come through a connection until the other side is closed, and then end at once."""
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    connection, worker = Connection(descriptor), RolloutWorker()
    while True:
        answer = worker.handle(connection.recv_bytes())
        if answer:
            connection.send_bytes(answer)


def _end_with(descriptor: int) -> None:
    """End this process when the training closes its side or is gone, in the middle of an episode too."""
    poll = select.poll()
    poll.register(descriptor, 0)  # nothing but hanging up
    poll.poll()
    os._exit(0)
