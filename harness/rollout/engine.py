"""DeepSpeed's rollout engine over tensor-parallel replicas beside a live trainer: ``sync_weights`` is a relayout.

    rollout = RelayoutRollout(engine_or_none, [(0, 1), (2, 3)], DecoderConfig.of(model.config), rows=8, slots=512)
    rollout.sync_weights(step)                          # every rank of the world, after a step of the trainer
    batch = rollout.generate(request, sampling)         # the ranks of a replica, with the same request

Trainer and replicas may be on the same ranks or on others. Weights are written in place: their addresses, the KV cache
and CUDA graphs stay from step to step, and over a change of replicas for those that it leaves as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.rollout.base import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig

from relaymeter.errors import InputError
from relaymeter.harness.rollout.replica import Replica
from relaymeter.harness.rollout.sampling import check_request
from relaymeter.harness.rollout.sequences import Sequences
from relaymeter.harness.rollout.shape import DecoderConfig
from relaymeter.harness.state_engines import EngineGroups
from relaymeter.relayout.execute import Hooks
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.weight_sync import SyncOptions, SyncTiming, WeightSync

__all__ = ["RelayoutRollout"]


class RelayoutRollout(RolloutEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """Every rank of the world makes one and calls ``sync_weights``, ``place``, ``replan`` and ``shutdown`` together;
    ``generate`` and ``resume`` are of the ranks of one replica.

    ``step`` is that of the weights, None while they are not usable; ``last`` the timing of the last move.
    """

    name = "relayout"

    def __init__(
        self,
        trainer: Any | None,
        replicas: Sequence[Sequence[int]],
        config: DecoderConfig,
        *,
        rows: int,
        slots: int,
        device: torch.device | str = "cpu",
        topology: Topology | None = None,
        options: SyncOptions | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        keep_cache: bool = False,
        graph: bool = True,
        seed: int = 0,
        heartbeat: Heartbeat | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """Read the trainer, plan, and allocate this rank's part; nothing moves yet.

        ``trainer``: a DeepSpeed engine of any ZeRO stage, None on ranks outside it. ``replicas``: ranks of each in the
        order of their shards. ``rows`` sequences of at most ``slots`` tokens are generated at once. ``keep_cache``: a
        new step's weights leave the KV cache as it is, for ``resume``. ``graph``: capture decode steps where that can
        be done. Raises on every rank InputError where trainer, config and replicas do not fit, PlanDisagreement where
        the ranks were given different things.
        """
        self._config, self._rows, self._slots, self._device = config, rows, slots, device
        self._eos, self._pad, self._seed = eos_token_id, pad_token_id, seed
        self._keep, self._graph = keep_cache, graph
        self._rank, self._drawn = dist.get_rank(), 0
        self._open: Sequences | None = None
        self.replica: Replica | None = None
        self.replicas: tuple[tuple[int, ...], ...] = ()
        self.step: int | None = None
        self.last: SyncTiming | None = None
        options = options or SyncOptions()
        self._sync = WeightSync(trainer, options, topology, heartbeat=heartbeat, hooks=hooks)
        self._groups = EngineGroups(options.time_limit_s)
        told: dict[str, Any] = {"rows": rows, "slots": slots, "keep_cache": keep_cache, "graph": graph, "seed": seed}
        told |= {"tokens": [eos_token_id, pad_token_id]}
        told |= {"config": dataclasses.asdict(config), "options": dataclasses.asdict(options)}
        few = rows < 1 or slots < 2
        self._agree(told, f"rows {rows} and slots {slots}: give at least 1 sequence and 2 tokens" if few else "")
        self.place(replicas)

    def _agree(self, settings: Any, wrong: str = "") -> None:
        with self._sync.together("comparing settings") as ranks:
            ranks.refuse(InputError(wrong) if wrong else None)
            ranks.announce(settings, "the rollout's settings")

    def place(self, replicas: Sequence[Sequence[int]]) -> None:
        """Generate on these replicas from now on. Collective.

        A replica whose ranks, in their order, were one before keeps weights, addresses, cache and graph. The others
        are made anew and, where there are weights, get them from the replicas that were there, checked by digest.
        Raises InputError, before anything changes, where the replicas do not fit the model or share a rank.
        """
        wanted = tuple(tuple(int(rank) for rank in ranks) for ranks in replicas)
        self._agree({"replicas": wanted})
        members = [rank for ranks in wanted for rank in ranks]
        twice = next((rank for rank in members if members.count(rank) > 1), None)
        if not wanted or twice is not None:
            raise InputError("no replica: give the ranks of each" if not wanted else f"rank {twice} is in two replicas")
        layout = self._config.replica_layout(self._sync.layout, wanted)
        fresh = [ranks for ranks in wanted if ranks not in self.replicas]
        groups = {ranks: self._groups.group(ranks) for ranks in fresh if len(ranks) > 1}
        own = next((ranks for ranks in wanted if self._rank in ranks), None)
        before, old, step = self.replica, self._old_layout(), self.step
        with self._sync.together("making the replicas") as all_ranks:
            made = all_ranks.attempt(
                lambda: before if own is None or own not in fresh else self._make(own, layout, groups)
            )
        self.step = None
        if old is not None and fresh and step is not None:
            new = self._config.replica_layout(self._sync.layout, fresh)
            source = before.storage.storages if before is not None else {}
            target = made.storage.storages if made is not None and own in fresh else {}
            self.last = self._sync.carry(old, new, source, target)
        self.replica = made if own is not None else None
        self._open = self._open if own not in fresh else None
        self.replicas, self.step = wanted, step
        self._sync.plan(layout, self._config.casts(self._sync.layout))

    def _old_layout(self) -> Layout | None:
        return self._sync.destination if self.replicas else None

    def _make(self, own: tuple[int, ...], layout: Layout, groups: Mapping[tuple[int, ...], Any]) -> Replica:
        return Replica(
            self._config,
            layout,
            self._rank,
            own,
            groups.get(own),
            rows=self._rows,
            slots=self._slots,
            device=self._device,
            graph=self._graph,
        )

    def use_trainer(self, trainer: Any | None) -> None:
        """Take the weights of another engine (None on ranks outside it) from the next sync on. Local; where it lies
        otherwise than planned, ``sync_weights`` refuses until ``replan``."""
        self._sync.trainer = trainer

    def replan(self) -> None:
        """Read the trainer anew and plan for where it holds its weights now. Collective. The replicas keep what they
        hold. Raises as the constructor."""
        self._sync.read()
        layout = self._config.replica_layout(self._sync.layout, self.replicas)
        self._sync.plan(layout, self._config.casts(self._sync.layout))

    def sync_weights(self, step: int) -> None:
        """Bring every replica to the trainer's weights, in place. Collective over the world, between steps.

        Raises InputError on every rank, and leaves the weights as they were, where the trainer lies otherwise than
        planned; RankLost, MoveTimeout and DigestMismatch as a move does: generating is refused then until a sync
        succeeds.
        """
        self._sync.prepare({} if self.replica is None else self.replica.storage.storages, step)
        self.step = None
        self.last = self._sync.run()
        if self.replica is not None and not self._keep:
            self.replica.reset()
            self._open = None
        self.step = step

    def _usable(self) -> tuple[Replica, int]:
        if self.replica is None:
            raise InputError(f"rank {self._rank} is in none of the replicas {[list(r) for r in self.replicas]}")
        if self.step is None:
            raise InputError("there are no weights to generate with: sync_weights(step) has not succeeded")
        return self.replica, self.step

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Prompts and responses, on the request's device; a temperature of 0 or less is greedy. The ranks of the
        replica call this together, with the same request, and get the same batch.

        Raises InputError where there are no weights yet, or the request does not fit rows and slots.
        """
        replica, step = self._usable()
        prompts, mask = check_request(request, sampling, self._rows, self._slots)
        self._drawn += 1
        numbers = (self._seed, step, self._drawn, self.replicas.index(replica.ranks))
        generator = torch.Generator().manual_seed(hash(numbers) & (2**63 - 1))
        self._open = Sequences.begin(prompts, mask, generator)
        return self._extend(self._open, replica, replica.prefill(prompts, mask), sampling)

    def resume(self, sampling: SamplingConfig) -> RolloutBatch:
        """Go on with the sequences of the last ``generate``, over their KV cache and with the weights as they are now;
        the batch is the whole sequences. The ranks of the replica call this together.

        Raises InputError where the cache was reset since (see ``keep_cache``), or has too few slots left.
        """
        replica, _ = self._usable()
        if self._open is None:
            raise InputError("there is nothing to resume: nothing was generated, or new weights have reset the cache")
        left = self._slots - replica.filled
        if sampling.max_new_tokens > left:
            raise InputError(f"max_new_tokens {sampling.max_new_tokens}: the cache of {self._slots} has {left} left")
        if bool(self._open.done.all()):
            return _batch(self._open)
        return self._extend(self._open, replica, replica.step(self._open.last(self._rows)), sampling)

    def _extend(
        self, sequences: Sequences, replica: Replica, logits: torch.Tensor, sampling: SamplingConfig
    ) -> RolloutBatch:
        sequences.extend(replica, logits, sampling, eos=self._eos, pad=self._pad)
        return _batch(sequences)

    def shutdown(self) -> None:
        """Give up the replicas and their groups. Collective; the trainer is left alone."""
        self.replica, self._open, self.step = None, None, None
        self._groups.close()


def _batch(sequences: Sequences) -> RolloutBatch:
    start = torch.full((len(sequences.done),), sequences.start, dtype=torch.int64, device=sequences.tokens.device)
    return RolloutBatch(sequences.tokens, sequences.mask, start)
