"""Jobs on the rollout engine: tokens by degree, what stays and what is refused. See ``rollout_bench``."""

from __future__ import annotations

from typing import Any

import torch
from jobs_engines import refusal
from pool import Seat
from rollout_bench import GEOMETRY, MASK, PROMPTS, Bench, addresses, ask, compared, greedy

from relaymeter.harness.models import Qwen3Geometry
from relaymeter.harness.rollout.shape import DecoderConfig
from relaymeter.relayout.execute import Hooks
from relaymeter.relayout.weight_sync import SyncOptions

#: Degree 1 on each rank, degree 2 twice, degree 4, and one of degree 2 beside one of degree 1, a rank idle.
PLACES = {
    "tp1": [[0], [1], [2], [3]],
    "tp2": [[0, 1], [2, 3]],
    "tp4": [[0, 1, 2, 3]],
    "mixed": [[3, 1], [0]],
}


def tokens(seat: Seat, stage: int, trainer: list[int], places: list[str], **kind: Any) -> dict[str, Any]:
    """For each of ``places`` the tokens after a step and a sync, and those that the replicas before had handed on."""
    bench = Bench(stage, trainer, **kind)
    bench.train()
    rollout = bench.rollout(PLACES[places[0]])
    found: dict[str, Any] = {}
    for number, name in enumerate(places):
        if number:
            rollout.place(PLACES[name])
            found[f"{name} handed on"] = compared(bench, rollout)
        bench.train()
        rollout.sync_weights(number)
        found[name] = compared(bench, rollout) | {"verified": rollout.last.verified}
    rollout.shutdown()
    bench.close()
    return found


def lives(seat: Seat) -> dict[str, Any]:
    """What stays over syncs and over a change of replicas, and when a sync is verified."""
    bench = Bench(3, range(4))
    rollout = bench.rollout(PLACES["tp2"], options=SyncOptions(verify_every=2, route="relay"), eos_token_id=66)
    found: dict[str, Any] = {"early": refusal(lambda: ask(rollout))}
    before, verified, schedule = addresses(rollout), [], rollout._sync.schedule
    for step in range(4):
        bench.train()
        rollout.sync_weights(step)
        verified.append(rollout.last.verified)
        ask(rollout)
    found["verified"] = verified
    found["once"] = rollout._sync.schedule is schedule
    found["addresses"] = addresses(rollout) == before
    found["filled"] = [rollout.replica.filled, float(rollout.replica.decoder.cache.abs().sum()) > 0]
    rollout.sync_weights(4)
    found["reset"] = [rollout.replica.filled, float(rollout.replica.decoder.cache.abs().sum())]
    found["nothing"] = refusal(lambda: ask(rollout, call="resume"))
    drawn = [ask(rollout, temperature=1.0, top_k=20, top_p=0.9, n_samples_per_prompt=1) for _ in range(2)]
    found["drawn"], found["drew"] = drawn[0], drawn[0] != drawn[1]
    held = rollout.replica, rollout.replica.decoder.cache.clone()
    rollout.place([[0, 1], [3], [2]])
    kept = rollout.replica is held[0]
    found["kept"] = [kept, kept and addresses(rollout) == before and torch.equal(held[1], held[0].decoder.cache)]
    found["after"] = ask(rollout)
    rollout.place([[0, 1]])
    found["outside"] = refusal(lambda: ask(rollout)) if rollout.replica else refusal(rollout._usable)
    found["still"] = ask(rollout)
    rollout.shutdown()
    bench.close()
    return found


def resumed(seat: Seat) -> dict[str, Any]:
    """Sequences that go on over a sync of the same weights, and over one of new ones."""
    bench = Bench(1, range(4))
    rollout = bench.rollout(PLACES["tp2"], keep_cache=True)
    rollout.sync_weights(0)
    whole = ask(rollout, 9)
    ask(rollout, 4)
    rollout.sync_weights(1)
    found = {"whole": whole, "resumed": ask(rollout, 5, "resume")}
    bench.train()
    rollout.sync_weights(2)
    long = ask(rollout, 4, "resume")
    found |= {"longer": [len(row) for row in long], "begins": [row[:15] for row in long] == whole}
    found["full"] = refusal(lambda: ask(rollout, 9, "resume"))
    rollout.shutdown()
    bench.close()
    return found


def changed(seat: Seat) -> dict[str, Any]:
    """Trainers that lie otherwise than planned, wrong bits, and what generates in between."""
    flips: list[int] = []

    def flip(number: int, peer: int, message: torch.Tensor) -> None:
        if flips and message.numel():
            flips.pop()
            message.view(torch.uint8)[5] ^= 16

    bench = Bench(3, range(4))
    rollout = bench.rollout([[2, 3]], hooks=Hooks(on_receive=flip))
    bench.train()
    rollout.sync_weights(0)
    first, schedule = ask(rollout), rollout._sync.schedule
    other = bench.build(1, (0, 1), seed=12)
    found: dict[str, Any] = {}
    rollout.use_trainer(other)
    found["layout"] = refusal(lambda: rollout.sync_weights(1))
    found["untouched"] = [rollout.step, ask(rollout) == first, rollout._sync.schedule is schedule]
    rollout.replan()
    found["replanned"] = [rollout.step, ask(rollout) == first, rollout._sync.schedule is not schedule]
    bench.train(other)
    rollout.sync_weights(1)
    model = bench.gathered(other)
    found |= {"tokens": ask(rollout), "wanted": greedy(model)[0] if model is not None else None}
    same = bench.build(1, (0, 1), seed=13)
    rollout.use_trainer(same)
    rollout.sync_weights(2)  # another engine that lies alike needs no new plan
    model = bench.gathered(same)
    found |= {"tokens 2": ask(rollout), "wanted 2": greedy(model)[0] if model is not None else None}
    flips += [1] if seat.rank == 2 else []
    found["wrong"] = refusal(lambda: rollout.sync_weights(3))
    found["unusable"] = "" if rollout.replica is None else refusal(lambda: ask(rollout))
    rollout.sync_weights(3)
    found["again"] = ask(rollout) == found["tokens 2"]
    found["steps"] = refusal(lambda: rollout.sync_weights(4 + (seat.rank == 1)))
    rollout.use_trainer(None)
    found["no trainer"] = refusal(lambda: rollout.sync_weights(4))
    rollout.shutdown()
    bench.close()
    return found


def refusals(seat: Seat) -> dict[str, str]:
    """What cannot be, as every rank hears of it."""
    bench = Bench(1, range(4))
    sizes = {**GEOMETRY, "dtype": "float32"}

    def made(replicas: Any = ((0, 1),), config: Any = None, **settings: Any) -> str:
        told = {} if config is None else {"config": DecoderConfig(**config)}
        return refusal(lambda: bench.rollout(replicas, **told, **settings).shutdown())

    wider = Qwen3Geometry(**(sizes | {"hidden_size": 40}))
    rollout = bench.rollout([[0, 1]])
    rollout.sync_weights(0)
    found = {
        "twice": made([[0, 1], [1, 2]]),
        "none": made([]),
        "outside": made([[0, 4]]),
        "degree": made([[0, 1, 2]]),
        "other sizes": made(config={"geometry": wider}),
        "no norms": made(config={"geometry": bench.geometry, "qk_norm": False}),
        "tied": made(config={"geometry": Qwen3Geometry(**sizes, tie_word_embeddings=True)}),
        "differ": made(seed=seat.rank),
        "no trainer": made(trainer=None),
        "rows": made(rows=0),
        "route": refusal(lambda: SyncOptions(route="teleport")),
        "every": refusal(lambda: SyncOptions(verify_every=-1)),
        "still": refusal(lambda: rollout.place([[0], [0]])),
        "step": str(rollout.step),
    }
    if rollout.replica is not None:
        found["samples"] = refusal(lambda: ask(rollout, n_samples_per_prompt=2))
        found["slots"] = refusal(lambda: ask(rollout, 15))
        found["continuous"] = refusal(lambda: ask(rollout, continuous_batch_size=2))
    rollout.shutdown()
    bench.close()
    return found


def casts(seat: Seat) -> dict[str, Any]:
    """An fp32 trainer's weights rounded to bfloat16 on their way, and those of a bfloat16 one as they are."""
    found = {}
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        bench = Bench(3, range(4), dtype=dtype)
        config = DecoderConfig(geometry=Qwen3Geometry(**GEOMETRY, dtype="bfloat16"))
        rollout = bench.rollout(PLACES["tp2"], config=config)
        bench.train()
        rollout.sync_weights(0)
        model = bench.gathered().bfloat16()
        own = rollout.replica.prefill(torch.tensor(PROMPTS), torch.tensor(MASK))[: len(PROMPTS)].float()
        found[name] = float((own - greedy(model, 1)[1]).abs().max())
        rollout.shutdown()
        bench.close()
    return found
