"""Which path a request takes, and which workers: one pure function, with a reason for every answer.

Not here: what happens after the choice (`request`), how worker facts are gathered (the gateway's fleet).

The rules, in order; the first that holds gives path and reason:

    endpoint_not_splittable   the endpoint has no prompt that farfill could split off
    several_prompts           one request, several prompts: one transfer carries one
    not_splittable:<field>    a parameter needs the whole prompt's logits, or several decodes that share state
    not_tokenizable           its token ids are not known: no prompt, one of a wrong type, or no /tokenize
    prompt_too_short          nothing to move: decode computes the last prompt token itself
    below_threshold           the uncached part is not longer than the threshold
    no_prefill_worker         none is configured for this model: "not there"
    prefill_unavailable       some are configured, none of them is up: "not available"
    incompatible:<field>      some are up, none of them may write what this decode worker reads
    relay_unavailable         transfers go through a relay, and it is down
    above_threshold           remote (or near, where both stand in one site)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from farfill.errors import OverloadError

NO_WORKER_RETRY_S: Final = 2.0  # one or two polls of the fleet


class Path(StrEnum):
    LOCAL = "local"  # the decode worker prefills
    NEAR = "near"  # a prefill worker in the decode worker's site
    REMOTE = "remote"  # a prefill worker in another site


class Placement(StrEnum):
    """Which store a transfer goes through; it changes an address and nothing else."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the router knows of one worker at the moment of a choice.

    Attributes:
        up: it answered the last poll and is not draining.
        outstanding_tokens: prompt and output tokens of requests that the gateway has given it and that have not ended.
    """

    name: str
    site: str
    model: str
    up: bool = True
    outstanding_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the router knows of one request.

    Attributes:
        prompt_tokens: tokens of the one prompt; 0 where the endpoint has none.
        cached_tokens: by decode worker, tokens of the prompt's prefix that it probably still has.
        blocker: the reason why it can't be split (see `splitting_blocker`), or None.
    """

    model: str
    prompt_tokens: int
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    blocker: str | None = None

    def uncached_tokens(self, worker: str) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens.get(worker, 0))


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`threshold_tokens`: more uncached prompt tokens than this go to a prefill worker."""

    threshold_tokens: int = 512
    placement: Placement = Placement.PRODUCER


@dataclass(frozen=True, slots=True)
class Choice:
    """A path, why, and who.

    Attributes:
        decode_workers: in the order of preference; the first is used, the others only where it fails before the
            first token. Never empty.
        prefill_worker, placement: None on the local path.
    """

    path: Path
    reason: str
    decode_workers: tuple[str, ...]
    prefill_worker: str | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        assert self.decode_workers, "a choice without a decode worker"
        assert (self.path is Path.LOCAL) == (self.prefill_worker is None) == (self.placement is None)


def splitting_blocker(endpoint_splittable: bool, body: Mapping[str, Any]) -> str | None:
    """Why this body can't be split between two engines, as a stable reason; None where it can."""
    if not endpoint_splittable:
        return "endpoint_not_splittable"
    for name in ("prompt_logprobs", "echo", "use_beam_search", "prompt_embeds"):
        # prompt_logprobs=0 still asks for the prompt's own logprobs; echo=false asks for nothing.
        if body.get(name) is not None and body.get(name) is not False:
            return f"not_splittable:{name}"
    best_of, count = body.get("best_of"), body.get("n")
    if isinstance(best_of, int) and best_of > (count if isinstance(count, int) else 1):
        return "not_splittable:best_of"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several_prompts"
    return None


def choose_path(
    facts: RequestFacts,
    decode: Sequence[WorkerFacts],
    prefill: Sequence[WorkerFacts],
    incompatible: Mapping[tuple[str, str], str],
    settings: RouterSettings,
    *,
    relay_up: bool = True,
) -> Choice:
    """Chooses the path and the workers of one request.

    Args:
        decode: workers that decode (roles `decode` and `both`); prefill: workers that prefill for others.
        incompatible: (prefill worker, decode worker) -> the fingerprint field in which they differ; a pair that is
            not in it is compatible.
        relay_up: the relay answers; it matters only where the placement is `RELAY`.

    Raises:
        OverloadError: `no_worker` where no decode worker of the model is up.
    """
    able = [worker for worker in decode if worker.up and worker.model == facts.model]
    if not able:
        raise OverloadError(
            "no_worker",
            f"no decode worker of model {facts.model!r} is up: wait for one, or start it",
            retry_after_s=NO_WORKER_RETRY_S,
        )
    # What it has to do before this request's first token: least first, ties by name.
    able.sort(key=lambda worker: (worker.outstanding_tokens + facts.uncached_tokens(worker.name), worker.name))
    chosen, names = able[0], tuple(worker.name for worker in able)

    def local(reason: str) -> Choice:
        return Choice(Path.LOCAL, reason, names)

    if facts.blocker is not None:
        return local(facts.blocker)
    if facts.prompt_tokens < 2:
        return local("prompt_too_short")
    if facts.uncached_tokens(chosen.name) <= settings.threshold_tokens:
        return local("below_threshold")
    configured = [worker for worker in prefill if worker.model == facts.model and worker.name != chosen.name]
    if not configured:
        return local("no_prefill_worker")
    up = sorted((worker for worker in configured if worker.up), key=lambda w: (w.outstanding_tokens, w.name))
    if not up:
        return local("prefill_unavailable")
    for worker in up:
        if (worker.name, chosen.name) not in incompatible:
            if settings.placement is Placement.RELAY and not relay_up:
                return local("relay_unavailable")
            path = Path.NEAR if worker.site == chosen.site else Path.REMOTE
            return Choice(path, "above_threshold", names, worker.name, settings.placement)
    return local(f"incompatible:{incompatible[up[0].name, chosen.name]}")
