"""`/ready`: one token generated through the real path, and which part of it failed.

Not `/health`, which says only that the process answers. Not a benchmark: one answer holds for a few seconds, and all
who ask meanwhile share it.

Ready means that requests are served as the operator wants it: remotely where prefill workers are configured, or, where
that fails, by a fallback that the policy allows (`degraded`).
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from farfill.errors import FailureClass, FarfillError
from farfill.gateway.choose import DECODERS
from farfill.gateway.gateway import Gateway
from farfill.gateway.work import Chosen, Work
from farfill.router.budget import FallbackPolicy
from farfill.router.messages import RecordOutcome
from farfill.router.policy import Path

TENANT: Final = "ready-probe"
_PROMPT: Final = "Say that you are ready."
_NO_FALLBACK: Final = FallbackPolicy(dict.fromkeys(FailureClass, "fail"))


class ProbeClient:
    """The end of a probe: keeps the error and the size of the answer."""

    def __init__(self) -> None:
        self.error: FarfillError | None = None
        self.headers: Mapping[str, str] = {}
        self.answer_bytes = 0

    async def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.headers = headers

    async def forward(self, data: bytes) -> None:
        self.answer_bytes += len(data)

    async def end(self) -> None:
        return None

    async def error_before_head(self, error: FarfillError, headers: Mapping[str, str]) -> None:
        self.error = error

    async def error_after_head(self, error: FarfillError, *, told: bool) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class Readiness:
    """`report` is the response's JSON."""

    ready: bool
    report: Mapping[str, Any]


class ReadyProbe:
    """Shares one probe among all who ask, and keeps its result for `settings.clocks.ready_s`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[Readiness] | None = None
        self._until = 0.0

    async def ask(self) -> Readiness:
        if self._gateway.admission.is_closed:
            return Readiness(False, {"ready": False, "part": "gateway", "detail": "it is stopping"})
        now = asyncio.get_running_loop().time()
        if self._task is None or (self._task.done() and now >= self._until):
            self._task = asyncio.create_task(self._probe(), name="ready probe")
        # Who asks may hang up; the others still wait for it.
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self) -> Readiness:
        models: dict[str, Any] = {}
        for model in sorted(self._gateway.fleet.models()):
            models[model] = await self._probe_model(model)
        self._until = asyncio.get_running_loop().time() + self._gateway.settings.clocks.ready_s
        if not models:
            failures = {
                name: worker.failure.to_openai()["error"]
                for name, worker in self._gateway.fleet.workers.items()
                if worker.failure is not None
            }
            return Readiness(False, {"ready": False, "part": "decode_worker", "workers": failures})
        ready = all(report["ready"] for report in models.values())
        return Readiness(ready, {"ready": ready, "models": models})

    async def _probe_model(self, model: str) -> dict[str, Any]:
        """Through a prefill worker where one is configured, and locally where that fails or there is none."""
        policy = self._gateway.settings.fallback.policy
        outcome, client, choice = await self._once(model, remote=True)
        report: dict[str, Any] = {
            "ready": outcome.state == "done",
            "path": None if outcome.path is None else outcome.path.value,
            "reason": outcome.reason,
            "kv_bytes": outcome.kv_bytes,
            "seconds": round(outcome.duration_s, 6),
        }
        if client.error is not None:
            report["part"] = _part(client.error, choice)
            report["error"] = client.error.to_openai()["error"]
            failure_class = client.error.failure_class
            remote = choice is not None and choice.choice.path is not Path.LOCAL
            if remote and failure_class is not None and policy.answer(failure_class) == "local":
                local, local_client, _ = await self._once(model, remote=False)
                report["ready"] = report["degraded"] = local.state == "done"
                if local_client.error is not None:
                    report["local_error"] = local_client.error.to_openai()["error"]
        elif self._wants_remote() and outcome.path is Path.LOCAL:
            # It works, and not as configured: the reason says why.
            report["degraded"] = True
        return report

    def _wants_remote(self) -> bool:
        workers = self._gateway.settings.workers
        return any(worker.role == "prefill" for worker in workers)

    async def _once(self, model: str, *, remote: bool) -> tuple[RecordOutcome, ProbeClient, Chosen | None]:
        # A nonce in front, so that no engine's prefix cache answers in place of the path.
        fields = {
            "model": model,
            "prompt": f"{os.urandom(4).hex()} {_PROMPT}",
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
        }
        work = Work(
            request_id=f"ready-{os.urandom(8).hex()}",
            tenant=TENANT,
            method="POST",
            target="/v1/completions",
            headers={},
            body=msgspec.json.encode(fields),
            fields=fields,
            output_tokens=1,
            generates=True,
        )
        threshold = 0 if remote else 2**62
        rules = replace(self._gateway.settings.router, threshold_tokens=threshold)
        chosen: list[Chosen] = []

        async def choose() -> Chosen:
            chosen.append(await self._gateway.choose.path(work, model, rules))
            return chosen[0]

        client = ProbeClient()
        outcome = await self._gateway.drive(work, client, choose, policy=_NO_FALLBACK)
        return outcome, client, chosen[0] if chosen else None


def _part(error: FarfillError, chosen: Chosen | None) -> str:
    """Which part of the path failed, as far as its error tells."""
    if chosen is None or chosen.choice.path is Path.LOCAL:
        return DECODERS[0] + "_worker"
    if error.code in ("engine_failed", "queue_timeout", "queue_full", "draining", "peer_unauthenticated"):
        names = (chosen.choice.prefill_worker, *chosen.choice.decode_workers[:1])
        return "worker: " + " or ".join(name for name in names if name is not None)
    by_class = {
        FailureClass.MISS: "store",
        FailureClass.OVERLOAD: "store",
        FailureClass.COMPATIBILITY: "compatibility",
        FailureClass.INTEGRITY: "transfer",
        FailureClass.TIMEOUT: "transfer",
        FailureClass.TRANSPORT: "transfer",
    }
    return "request" if error.failure_class is None else by_class[error.failure_class]
